"""Beam's arithmetic on a CPU: compiled loops that the embedded sampler and learner share.

Each value of a row is computed by operations in an order that its formula fixes, never by the number of rows, threads
or sequences that happen to be there: a matrix product adds its terms one after the other, a softmax goes over positions
in their order. So a row has the same bits whatever is computed beside it, and the same bits in both engines. (Gradients
of weights are sums over rows, and follow the cut of the batch.)

Everything is float32. ``bf16=True`` rounds to bfloat16 where a model of that type would, and computes as if it were
one; the values stay in float32 arrays.
"""
