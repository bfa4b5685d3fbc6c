"""``python -m beamline``, which is what torchrun starts."""

from beamline.cli import main

main()
