"""Code generation: from the one definition of a rule to kernels in C and Triton, and to lists of foreach operations.

    rule --trace--> Program --kernel_spec--> KernelSpec --c_source-------> C header of the native library
                       |                         |-------triton_source--> Triton kernels
                       |---foreach_fusion--> instructions for torch's foreach operations

Nothing here imports torch, numpy or Triton: the environment that builds the package has none of them.
``python tools/show_kernels.py adam`` prints the kernels of a rule.
"""
