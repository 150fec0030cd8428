/* The kernels of one instruction set: compiled once for each, with its flags and PIPPIN_ISA_xxx. */
#include "kernels.h"

#include "attention.h"
#include "flow.h"
#include "matmul.inc"

#if defined(PIPPIN_ISA_AVX512BF16)
#define PIPPIN_EXPORT kernels_avx512bf16
#elif defined(PIPPIN_ISA_AVX512VNNI)
#define PIPPIN_EXPORT kernels_avx512vnni
#elif defined(PIPPIN_ISA_AVX2)
#define PIPPIN_EXPORT kernels_avx2
#elif defined(PIPPIN_ISA_NEON)
#define PIPPIN_EXPORT kernels_neon
#else
#define PIPPIN_EXPORT kernels_generic
#endif

/* Filled when it is first asked for, and not when the library is loaded: the compiler fills it with the instructions of
   this variant, which the machine may not have. */
const pippin::KernelTable *pippin::PIPPIN_EXPORT() {
    using namespace PIPPIN_NS;
    static const KernelTable table = {PIPPIN_ISA_NAME, prepare, matmul_panels, step_kernels(), flow_kernels()};
    return &table;
}
