/* Vectors of one AVX-512 register. See simd.h for the names. */
#ifndef PIPPIN_SIMD_AVX512_H
#define PIPPIN_SIMD_AVX512_H

/* GCC 12 warns of the deliberately undefined operands inside its own header. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

namespace PIPPIN_NS {

struct i32x16 {
    __m512i v;
    static PIPPIN_MEMBER i32x16 zero() { return {_mm512_setzero_si512()}; }
    static PIPPIN_MEMBER i32x16 set1(int32_t x) { return {_mm512_set1_epi32(x)}; }
};
PIPPIN_INLINE i32x16 operator+(i32x16 a, i32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }

/* 64 bytes without a sign: byte 4r + j belongs to lane r. */
struct u8x64 {
    __m512i v;
    static PIPPIN_MEMBER u8x64 load(const void *p) { return {_mm512_loadu_si512(p)}; }
    static PIPPIN_MEMBER u8x64 set1(uint8_t x) { return {_mm512_set1_epi8(static_cast<char>(x))}; }
};
PIPPIN_INLINE u8x64 and_(u8x64 a, u8x64 b) { return {_mm512_and_si512(a.v, b.v)}; }
PIPPIN_INLINE u8x64 or_(u8x64 a, u8x64 b) { return {_mm512_or_si512(a.v, b.v)}; }
/* (a & mask) | b */
PIPPIN_INLINE u8x64 and_or(u8x64 a, u8x64 mask, u8x64 b) {
    return {_mm512_ternarylogic_epi32(a.v, mask.v, b.v, 0xea)};
}
/* Shifts of 16-bit lanes: bits cross from byte to byte, so a mask has to follow. */
template <int N> PIPPIN_INLINE u8x64 shift_right(u8x64 a) { return {_mm512_srli_epi16(a.v, N)}; }
template <int N> PIPPIN_INLINE u8x64 shift_left(u8x64 a) { return {_mm512_slli_epi16(a.v, N)}; }

/* acc[r] + sum_{j<4} codes[4r + j] * four[j], exact. SMALL: no code is above 127. */
template <bool SMALL = false> PIPPIN_INLINE i32x16 dot(i32x16 acc, u8x64 codes, const int8_t *four) {
    int32_t word;
    memcpy(&word, four, 4);
    return {_mm512_dpbusd_epi32(acc.v, codes.v, _mm512_set1_epi32(word))};
}

struct f32x16 {
    __m512 v;
    static PIPPIN_MEMBER f32x16 loadu(const float *p) { return {_mm512_loadu_ps(p)}; }
    static PIPPIN_MEMBER f32x16 zero() { return {_mm512_setzero_ps()}; }
    static PIPPIN_MEMBER f32x16 set1(float x) { return {_mm512_set1_ps(x)}; }
    /* The first n (0 to 16) lanes from memory, the others 0; nothing beyond is read. */
    static PIPPIN_MEMBER f32x16 loadu_first(const float *p, int n) {
        return {_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p)};
    }
    static PIPPIN_MEMBER f32x16 from_bf16(const uint16_t *p) {
        const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
        return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
    }
    static PIPPIN_MEMBER f32x16 from_f16(const void *p) {
        return {_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i *>(p)))};
    }
    static PIPPIN_MEMBER f32x16 from_i32(i32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
    static PIPPIN_MEMBER f32x16 from_i8(const int8_t *p) {
        return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))))};
    }
    static PIPPIN_MEMBER f32x16 from_u8(const uint8_t *p) {
        return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))))};
    }
    PIPPIN_MEMBER void storeu(float *p) const { _mm512_storeu_ps(p, v); }
    PIPPIN_MEMBER void store_first(float *p, int n) const {
        _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), v);
    }
    /* Round to nearest even; NaN stays NaN. */
    PIPPIN_MEMBER void to_bf16(uint16_t *p) const {
        const __m512i bits = _mm512_castps_si512(v);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        __m512i out = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
        const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        out = _mm512_mask_or_epi32(out, nan, bits, _mm512_set1_epi32(0x400000));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(out, 16)));
    }
    /* Round half to even, clamped to [-128, 127]; no NaN. */
    PIPPIN_MEMBER void to_i8(int8_t *p) const {
        _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v)));
    }
};
PIPPIN_INLINE f32x16 operator+(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
PIPPIN_INLINE f32x16 operator-(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
PIPPIN_INLINE f32x16 operator*(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
PIPPIN_INLINE f32x16 operator/(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
PIPPIN_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
/* Where a lane of either is NaN: the lane of b. */
PIPPIN_INLINE f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
PIPPIN_INLINE f32x16 min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
PIPPIN_INLINE f32x16 abs(f32x16 a) { return {_mm512_abs_ps(a.v)}; }
PIPPIN_INLINE f32x16 sqrt(f32x16 a) { return {_mm512_sqrt_ps(a.v)}; }
PIPPIN_INLINE f32x16 round(f32x16 a) { return {_mm512_roundscale_ps(a.v, 8)}; }
/* Lanes [0, n) of a, the others of b. */
PIPPIN_INLINE f32x16 first(int n, f32x16 a, f32x16 b) {
    return {_mm512_mask_mov_ps(b.v, static_cast<__mmask16>((1u << n) - 1), a.v)};
}
/* p * 2^n for whole n, rounded once. */
PIPPIN_INLINE f32x16 scale_by_power(f32x16 p, f32x16 n) { return {_mm512_scalef_ps(p.v, n.v)}; }
/* Lane i is paired with i + 8, then + 4, + 2, + 1: the same order in every instruction set. */
PIPPIN_INLINE float reduce_add(f32x16 a) {
    const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), high);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
PIPPIN_INLINE float reduce_max(f32x16 a) {
    const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
    const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(a.v), high);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

/* acc[r] + w[2r] x[0] + w[2r + 1] x[1] in float32, of 16 pairs of bfloat16 and one pair for all lanes. */
PIPPIN_INLINE f32x16 dot_bf16(f32x16 acc, const uint16_t *pairs, uint32_t pair) {
    const __m512i w = _mm512_loadu_si512(pairs);
    const __m512i x = _mm512_set1_epi32(static_cast<int32_t>(pair));
#if defined(PIPPIN_ISA_AVX512BF16)
    return {_mm512_dpbf16_ps(acc.v, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(x))};
#else
    const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
    acc.v = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(w, 16)),
                            _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), acc.v);
    return {_mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(w, upper)),
                            _mm512_castsi512_ps(_mm512_and_si512(x, upper)), acc.v)};
#endif
}
/* Ask for the cache line of p. */
PIPPIN_INLINE void prefetch(const void *p) { _mm_prefetch(static_cast<const char *>(p), _MM_HINT_T0); }

}  // namespace PIPPIN_NS

#endif
