"""Attacks by kind: one response for several expected answers, second answers in prose, numbers that only look given."""

from tests.unit.tasks.graders.table import Case

INTEGRAL = r"\int_0^1 x^2 \, dx"

ATTACKS = (
    # a ratio whose terms are no numbers, or begin with zero, equalled every other of that kind
    Case(
        r"\sqrt{2}:1",
        (r"Answer: \sqrt2 : 1", r"Answer: 2:\sqrt{2}"),
        (r"Answer: \sqrt{3}:1", "Answer: x:y", "Answer: 0:1"),
    ),
    Case("x:y", ("Answer: x:y", "Answer: 2x:2y"), ("Answer: y:x", "Answer: a:b", "Answer: 0:5", r"Answer: \pi:1")),
    Case("0:1", ("Answer: 0:1",), ("Answer: 0:34:2", "Answer: 1:0", "Answer: 0:0", r"Answer: 0:\sqrt2")),
    Case("1:2:3", ("Answer: 2:4:6",), ("Answer: 1:2", r"Answer: \pi:2:3", "Answer: 1:3:2")),
    # two values joined as if one rounded the other
    Case(
        "3.14",
        (r"Answer: \pi \approx 3.14", r"Answer: 3.14159 \approx 3.14"),
        (r"Answer: 3.2 \approx 3.14", r"Answer: 3.1 \approx 3.14", r"Answer: 3.15 \approx 3.14159"),
    ),
    Case("3.2", (r"Answer: 3.19 \approx 3.2",), (r"Answer: 3.1 \approx 3.2", r"Answer: 3.2 \approx 3.1")),
    Case(r"\pi", (r"Answer: \pi \approx 3.1416", r"Answer: \pi \approx 22/7"), (r"Answer: \pi \approx 3.2",)),
    Case(
        r"\frac{1000}{3}",
        (r"Answer: \frac{1000}{3} \approx 333.33", r"Answer: \frac{1000}{3} \approx 330"),
        (r"Answer: \frac{1000}{3} \approx 340", r"Answer: \frac{1000}{3} \approx 334"),
    ),
    Case("0.4", ("Answer: 0.4",), (r"Answer: 0.4 \approx \frac13",)),
    # degrees
    Case(
        r"\frac12",
        (
            r"Answer: \sin 30^\circ",
            r"Answer: \sin(30^\circ)",
            r"Answer: \cos{60^{\circ}}",
            "Answer: sin 30°",
            r"\boxed{\cos 60^\circ}",
            r"Answer: 2\sin 15^\circ\cos 15^\circ",
            r"Answer: \sin^2 45^\circ",
            r"Answer: \frac{\tan 45^\circ}{2}",
            r"Answer: 1 - \cos 60^\circ",
        ),
        (r"Answer: \sin 30", r"Answer: \sin(30)^\circ", r"Answer: \cos 30^\circ", r"Answer: \sin 30^\circ^\circ"),
    ),
    Case(r"\sin 30", (r"Answer: \sin 30",), (r"Answer: \sin 30^\circ", "Answer: sin 30 degrees")),
    Case(
        r"\sin 20^\circ", (r"Answer: \cos 70^\circ", r"Answer: \sin \frac{\pi}{9}"), (r"Answer: \sin 20", "Answer: 20°")
    ),
    Case(r"30^\circ", ("Answer: 30", "Answer: 30°", "Answer: 30 degrees"), ("Answer: 30 rad",)),
    # integrals and their kin: every side of a chain counts
    Case(
        INTEGRAL,
        (r"Answer: \frac13", r"Answer: x = \frac13", r"Answer: \frac13 = \frac{2}{6}", f"Answer: {INTEGRAL} = 1/3"),
        (
            r"Answer: \frac12 = \frac13",
            r"Answer: \frac13 = \frac12",
            r"Answer: \frac13 \approx 0.5",
            r"Answer: \frac13 \to \frac12",
            r"Answer: \pm\frac13",
            r"Answer: \frac13 < 1",
            "Answer: 1 = 1",
        ),
    ),
    Case("even", ("Answer: even", "Answer: even, because 2 divides it"), ("Answer: even, odd", "Answer: even (odd)")),
    Case(
        "34",
        (
            "Answer: 34. Note that 35 is odd.",
            "Answer: 34 because 35 is odd.",
            "Answer: 34. Equivalently, 68/2.",
            "Answer: 34\nEquivalently, 34.0.",
            r"Answer: 10m + n = 30 + 4 = 34",
            r"$n^2 = 36 - 2 = \boxed{34}$",
            "The final answer is $34$!",
        ),
        (
            "Answer: 34 !",
            r"Answer: 34\,!",
            "Answer: ~~34~~",
            "Answer: x^2 = y = 34",
            "Answer: 2x = x + 17 = 34",
            r"Answer: 34 \approx 35",
            "Answer: 34 trillions",
            "Answer: 34 lakhs",
            "Answer: 34 reciprocals",
            "Answer: 34 negatives",
            r"\boxed{34}.5",
            "Answer: 34 given n even, 35 given n odd",
            "Answer: 34 using A, 35 using B",
            "Answer: 34 using the first method, but 35 using the second",
            "Answer: 34 by parity, 35 by symmetry",
            "Answer: 34 because why not, and also 35",
            "Answer: 34 which may be 35",
            "Answer: 34. 35.",
            "Answer: 34. 35 works too.",
            "Answer: 34. Also 35.",
            "Answer: 34. Also possible: 35",
            "Answer: 34. Another is 35.",
            "Answer: 34. Equivalently 35.",
            "Answer: 34! 35!",
            "Answer: 34\nEquivalently, 35.",
            "Answer: 34\n35 is also acceptable.",
            "Answer: 34\nNote that 35 is also correct.",
            "Answer: 34\nThe other root is 35.",
            "Answer: 34\nSorry, 35",
        ),
    ),
)
