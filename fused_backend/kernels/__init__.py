"""One file per fused kernel: device code, its contract, its launch shape.

A kernel module offers `CONTRACT` and `launch`, the host function that the builder traces. Modules here import the
kernel toolkit; whoever only audits or launches works from the artifact store and never imports them.
"""

KERNELS = ("attn_res",)
