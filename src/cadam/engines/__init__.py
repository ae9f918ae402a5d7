"""The engines, which run steps: C kernels, Triton kernels, list operations and plain tensor operations.

- `base`: the interface of an engine, and the slots and batches that it receives.
- `resolved_group`: the options of a parameter group as plain values.
- `step_plan`: the engine of each parameter, kept from step to step; notices every change between steps.
- `selection`: the choice of the fastest engine that supports a parameter.
- `reference`, `sparse_reference`, `foreach`: engines without compiled kernels. `cpu` and `cuda`: engines with them.
- `replay`: steps that are recorded and taken again with one call.
- `quantization`, `row_layout`, `huge_pages`: the storage of optimizer state.
"""
