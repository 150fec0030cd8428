from . import triton_attention as triton_attention, triton_matvec as triton_matvec, triton_scan as triton_scan
