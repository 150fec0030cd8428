/* The kernels of one instruction set, as a table of functions: kernels.cpp is compiled once for each of them. */
#ifndef PIPPIN_KERNELS_H
#define PIPPIN_KERNELS_H

#include "matmul.h"
#include "pippin.h"
#include "step.h"

namespace pippin {

struct KernelTable {
    const char *name;
    /* Activations of tokens [begin, end) out of `tokens`, into `buffer` (activation_bytes; 64-byte aligned). Calls for
     * different tokens may run at the same time; all return the same view. */
    Activations (*prepare)(ActivationKind kind, const float *x, int64_t stride, int64_t tokens, int64_t columns,
                           void *buffer, int64_t begin, int64_t end);
    /* Outputs [16 panel_begin, min(16 panel_end, rows)) of all tokens, on this thread. a.kind must be
     * activation_kind(weight.format). bias: (rows) or nullptr. y: (tokens, rows), y_stride in elements. */
    void (*matmul_panels)(const pippin_matrix &weight, const Activations &a, int64_t panel_begin, int64_t panel_end,
                          float *y, int64_t y_stride, const float *bias);
    /* All else that a decoder does to vectors. */
    StepKernels step;
    /* What flow blocks need besides. */
    FlowKernels flow;
};

/* Those that were compiled in; the dispatcher asks the processor which it may use. */
const KernelTable *kernels_avx512bf16();
const KernelTable *kernels_avx512vnni();
const KernelTable *kernels_avx2();
const KernelTable *kernels_neon();
const KernelTable *kernels_generic();
/* The table in use (library.cpp). */
const KernelTable &kernels();

}  // namespace pippin

#endif
