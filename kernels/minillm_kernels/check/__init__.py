"""What it takes to believe a kernel: cases, poisoned memory, comparison with float64.

Tests run these cases interpreted; `minillm.lab.gpu` runs them compiled on a GPU.
Each family has a module here with

* a frozen `Case` that names every size of one call, and `CASES`, which cover the edges;
* `random_case(rng)`: any other one;
* `verify(case, device, kernels)`: raises `Mismatch` where the launcher of the module `kernels` (the
  family's own, or a deliberately broken copy) is wrong;
* `LAUNCHES`: calls with the shapes of real models, to be compiled without a GPU.
"""
