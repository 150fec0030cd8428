/* The thin layer of vector types over which all kernels are written once.
 *
 * Notable here:
 * - one macro of the compile, PIPPIN_ISA_xxx, chooses the instruction set; everything lies in a namespace of its own
 * - a vector has 16 float32 or int32 lanes everywhere; where registers are narrower it is an array of registers
 * - kernel sources use no templates or inline functions of the standard library: the linker keeps one copy of those,
 *   which may come from the wrong instruction set
 */
#ifndef PIPPIN_SIMD_H
#define PIPPIN_SIMD_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(PIPPIN_ISA_AVX512BF16)
#define PIPPIN_NS pippin_avx512bf16
#define PIPPIN_ISA_NAME "avx512bf16"
#elif defined(PIPPIN_ISA_AVX512VNNI)
#define PIPPIN_NS pippin_avx512vnni
#define PIPPIN_ISA_NAME "avx512vnni"
#elif defined(PIPPIN_ISA_AVX2)
#define PIPPIN_NS pippin_avx2
#define PIPPIN_ISA_NAME "avx2"
#elif defined(PIPPIN_ISA_NEON)
#define PIPPIN_NS pippin_neon
#define PIPPIN_ISA_NAME "neon"
#else
#ifndef PIPPIN_ISA_GENERIC
#define PIPPIN_ISA_GENERIC
#endif
#define PIPPIN_NS pippin_generic
#define PIPPIN_ISA_NAME "generic"
#endif

#define PIPPIN_INLINE static inline __attribute__((always_inline))
#define PIPPIN_MEMBER inline __attribute__((always_inline))

#if defined(PIPPIN_ISA_AVX512BF16) || defined(PIPPIN_ISA_AVX512VNNI)
#include "simd_avx512.h"
#elif defined(PIPPIN_ISA_AVX2)
#include "simd_avx2.h"
#elif defined(PIPPIN_ISA_NEON)
#include "simd_neon.h"
#else
#include "simd_generic.h"
#endif

namespace PIPPIN_NS {

#if !defined(PIPPIN_ISA_AVX2)
/* A sum of integer products; BITS of the codes. At most kQuads may be added. */
template <int BITS> struct DotSum {
    static constexpr int kQuads = 8;
    i32x16 sum;
    static PIPPIN_MEMBER DotSum zero() { return {i32x16::zero()}; }
    PIPPIN_MEMBER void add(u8x64 codes, const int8_t *four) { sum = dot<(BITS < 8)>(sum, codes, four); }
    PIPPIN_MEMBER i32x16 total() const { return sum; }
};
#endif

/* e^r - 1 for x = n ln 2 + r with |r| <= ln 2 / 2, by a polynomial of degree 7.
 * Source: the coefficients are those of Cephes' expf (S. Moshier), a minimax fit on that interval. */
PIPPIN_INLINE f32x16 exp_rest(f32x16 x, f32x16 n) {
    f32x16 r = fma(n, f32x16::set1(-0.693359375f), x);
    r = fma(n, f32x16::set1(2.12194440e-4f), r);
    f32x16 p = f32x16::set1(1.9875691500e-4f);
    p = fma(p, r, f32x16::set1(1.3981999507e-3f));
    p = fma(p, r, f32x16::set1(8.3334519073e-3f));
    p = fma(p, r, f32x16::set1(4.1665795894e-2f));
    p = fma(p, r, f32x16::set1(1.6666665459e-1f));
    p = fma(p, r, f32x16::set1(5.0000001201e-1f));
    return fma(p, r * r, r);
}

/* exp(x) within 2 units in the last place; 0 at and below -104, infinity above 89, NaN stays NaN. */
PIPPIN_INLINE f32x16 exp(f32x16 x) {
    x = min(f32x16::set1(89.f), max(f32x16::set1(-104.f), x));  // the second operand is the one that a NaN survives in
    const f32x16 n = round(x * f32x16::set1(1.44269504088896341f));
    const f32x16 p = exp_rest(x, n) + f32x16::set1(1.f);
    return scale_by_power(p, n);
}

/* exp(x) - 1 with the precision of small values: 2^n (e^r - 1) + (2^n - 1), for x up to 88. */
PIPPIN_INLINE f32x16 expm1(f32x16 x) {
    x = min(f32x16::set1(88.f), max(f32x16::set1(-104.f), x));
    const f32x16 one = f32x16::set1(1.f), n = round(x * f32x16::set1(1.44269504088896341f));
    return scale_by_power(exp_rest(x, n), n) + (scale_by_power(one, n) - one);
}

}  // namespace PIPPIN_NS

#endif
