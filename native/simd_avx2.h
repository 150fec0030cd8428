/* Vectors of two AVX2 registers. See simd.h for the names. */
#ifndef PIPPIN_SIMD_AVX2_H
#define PIPPIN_SIMD_AVX2_H

#include <immintrin.h>

namespace PIPPIN_NS {

/* All bits set in lanes [0, n) of the eight that begin at `from`. */
PIPPIN_INLINE __m256i lanes_below(int n, int from) {
    const __m256i index = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(from));
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), index);
}

struct i32x16 {
    __m256i a, b;
    static PIPPIN_MEMBER i32x16 zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
    static PIPPIN_MEMBER i32x16 set1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
};
PIPPIN_INLINE i32x16 operator+(i32x16 x, i32x16 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }

/* 64 bytes without a sign: byte 4r + j belongs to lane r. */
struct u8x64 {
    __m256i a, b;
    static PIPPIN_MEMBER u8x64 load(const void *p) {
        const __m256i *both = static_cast<const __m256i *>(p);
        return {_mm256_loadu_si256(both), _mm256_loadu_si256(both + 1)};
    }
    static PIPPIN_MEMBER u8x64 set1(uint8_t x) {
        const __m256i v = _mm256_set1_epi8(static_cast<char>(x));
        return {v, v};
    }
};
PIPPIN_INLINE u8x64 and_(u8x64 x, u8x64 y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
PIPPIN_INLINE u8x64 or_(u8x64 x, u8x64 y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
/* (x & mask) | y */
PIPPIN_INLINE u8x64 and_or(u8x64 x, u8x64 mask, u8x64 y) { return or_(and_(x, mask), y); }
/* Shifts of 16-bit lanes: bits cross from byte to byte, so a mask has to follow. */
template <int N> PIPPIN_INLINE u8x64 shift_right(u8x64 x) {
    return {_mm256_srli_epi16(x.a, N), _mm256_srli_epi16(x.b, N)};
}
template <int N> PIPPIN_INLINE u8x64 shift_left(u8x64 x) {
    return {_mm256_slli_epi16(x.a, N), _mm256_slli_epi16(x.b, N)};
}

/* Eight lanes of `dot`. Sums of two products saturate at 16 bits: they fit only if no code is above 127. */
PIPPIN_INLINE __m256i dot_small(__m256i acc, __m256i codes, __m256i four) {
    const __m256i pairs = _mm256_maddubs_epi16(codes, four);
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
/* Any codes: even and odd bytes as 16-bit numbers. */
PIPPIN_INLINE __m256i dot_large(__m256i acc, __m256i codes, __m256i four) {
    const __m256i even = _mm256_and_si256(codes, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(codes, 8);
    const __m256i by_even = _mm256_srai_epi16(_mm256_slli_epi16(four, 8), 8), by_odd = _mm256_srai_epi16(four, 8);
    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(even, by_even));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(odd, by_odd));
}
/* acc[r] + sum_{j<4} codes[4r + j] * four[j], exact. SMALL: no code is above 127. */
template <bool SMALL = false> PIPPIN_INLINE i32x16 dot(i32x16 acc, u8x64 codes, const int8_t *four) {
    int32_t word;
    memcpy(&word, four, 4);
    const __m256i by = _mm256_set1_epi32(word);
    if constexpr (SMALL) return {dot_small(acc.a, codes.a, by), dot_small(acc.b, codes.b, by)};
    return {dot_large(acc.a, codes.a, by), dot_large(acc.b, codes.b, by)};
}

/* A sum of integer products; BITS of the codes. At most kQuads may be added: activations are in [-127, 127], so that
 * sums of two products with codes below 2^BITS stay below 2^15 for that many of them, and 16-bit lanes hold them. */
template <int BITS> struct DotSum {
    static constexpr int kQuads = BITS <= 4 ? 8 : BITS == 5 ? 4 : 2;
    static_assert(kQuads * 2 * ((1 << BITS) - 1) * 127 < 1 << 15, "16 bits");
    __m256i a, b;
    static PIPPIN_MEMBER DotSum zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
    PIPPIN_MEMBER void add(u8x64 codes, const int8_t *four) {
        int32_t word;
        memcpy(&word, four, 4);
        const __m256i by = _mm256_set1_epi32(word);
        a = _mm256_add_epi16(a, _mm256_maddubs_epi16(codes.a, by));
        b = _mm256_add_epi16(b, _mm256_maddubs_epi16(codes.b, by));
    }
    PIPPIN_MEMBER i32x16 total() const {
        const __m256i ones = _mm256_set1_epi16(1);
        return {_mm256_madd_epi16(a, ones), _mm256_madd_epi16(b, ones)};
    }
};
template <> struct DotSum<8> {
    static constexpr int kQuads = 8;
    i32x16 sum;
    static PIPPIN_MEMBER DotSum zero() { return {i32x16::zero()}; }
    PIPPIN_MEMBER void add(u8x64 codes, const int8_t *four) { sum = dot(sum, codes, four); }
    PIPPIN_MEMBER i32x16 total() const { return sum; }
};

struct f32x16 {
    __m256 a, b;
    static PIPPIN_MEMBER f32x16 loadu(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
    static PIPPIN_MEMBER f32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
    static PIPPIN_MEMBER f32x16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
    /* The first n (0 to 16) lanes from memory, the others 0; nothing beyond is read. */
    static PIPPIN_MEMBER f32x16 loadu_first(const float *p, int n) {
        return {_mm256_maskload_ps(p, lanes_below(n, 0)), _mm256_maskload_ps(p + 8, lanes_below(n, 8))};
    }
    static PIPPIN_MEMBER f32x16 from_bf16(const uint16_t *p) {
        const __m128i *both = reinterpret_cast<const __m128i *>(p);
        const __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128(both));
        const __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128(both + 1));
        return {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
    }
    static PIPPIN_MEMBER f32x16 from_f16(const void *p) {
        const __m128i *both = static_cast<const __m128i *>(p);
        return {_mm256_cvtph_ps(_mm_loadu_si128(both)), _mm256_cvtph_ps(_mm_loadu_si128(both + 1))};
    }
    static PIPPIN_MEMBER f32x16 from_i32(i32x16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
    static PIPPIN_MEMBER f32x16 from_i8(const int8_t *p) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
        return from_i32({_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))});
    }
    static PIPPIN_MEMBER f32x16 from_u8(const uint8_t *p) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
        return from_i32({_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))});
    }
    PIPPIN_MEMBER void storeu(float *p) const {
        _mm256_storeu_ps(p, a);
        _mm256_storeu_ps(p + 8, b);
    }
    PIPPIN_MEMBER void store_first(float *p, int n) const {
        _mm256_maskstore_ps(p, lanes_below(n, 0), a);
        _mm256_maskstore_ps(p + 8, lanes_below(n, 8), b);
    }
    static PIPPIN_MEMBER __m256i bf16_bits(__m256 v) {
        const __m256i bits = _mm256_castps_si256(v);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
        const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
        const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
        return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    }
    /* Round to nearest even; NaN stays NaN. */
    PIPPIN_MEMBER void to_bf16(uint16_t *p) const {
        const __m256i packed = _mm256_packus_epi32(bf16_bits(a), bf16_bits(b));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm256_permute4x64_epi64(packed, 0xd8));
    }
    /* Round half to even, clamped to [-128, 127]; no NaN. */
    PIPPIN_MEMBER void to_i8(int8_t *p) const {
        const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b));
        const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
        const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(p), bytes);
    }
};
PIPPIN_INLINE f32x16 operator+(f32x16 x, f32x16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
PIPPIN_INLINE f32x16 operator-(f32x16 x, f32x16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
PIPPIN_INLINE f32x16 operator*(f32x16 x, f32x16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
PIPPIN_INLINE f32x16 operator/(f32x16 x, f32x16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
PIPPIN_INLINE f32x16 fma(f32x16 x, f32x16 y, f32x16 z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
/* Where a lane of either is NaN: the lane of y. */
PIPPIN_INLINE f32x16 max(f32x16 x, f32x16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
PIPPIN_INLINE f32x16 min(f32x16 x, f32x16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
PIPPIN_INLINE f32x16 abs(f32x16 x) {
    const __m256 sign = _mm256_set1_ps(-0.f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
PIPPIN_INLINE f32x16 sqrt(f32x16 x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
PIPPIN_INLINE f32x16 round(f32x16 x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }
/* Lanes [0, n) of x, the others of y. */
PIPPIN_INLINE f32x16 first(int n, f32x16 x, f32x16 y) {
    return {_mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(lanes_below(n, 0))),
            _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(lanes_below(n, 8)))};
}
/* p * 2^n for whole n of [-252, 254], in two steps: the second one rounds where the result is subnormal. */
PIPPIN_INLINE __m256 scale_half(__m256 p, __m256 n) {
    const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
    const __m256i bias = _mm256_set1_epi32(127), rest = _mm256_sub_epi32(whole, half);
    p = _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)));
    return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
}
PIPPIN_INLINE f32x16 scale_by_power(f32x16 p, f32x16 n) { return {scale_half(p.a, n.a), scale_half(p.b, n.b)}; }
/* Lane i is paired with i + 8, then + 4, + 2, + 1: the same order in every instruction set. */
PIPPIN_INLINE float reduce_add(f32x16 x) {
    const __m256 eight = _mm256_add_ps(x.a, x.b);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
PIPPIN_INLINE float reduce_max(f32x16 x) {
    const __m256 eight = _mm256_max_ps(x.a, x.b);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

/* acc[r] + w[2r] x[0] + w[2r + 1] x[1] in float32, of 16 pairs of bfloat16 and one pair for all lanes. */
PIPPIN_INLINE f32x16 dot_bf16(f32x16 acc, const uint16_t *pairs, uint32_t pair) {
    const __m256i upper = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u));
    const __m256i x = _mm256_set1_epi32(static_cast<int32_t>(pair));
    const __m256 low = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
    const __m256 high = _mm256_castsi256_ps(_mm256_and_si256(x, upper));
    const u8x64 w = u8x64::load(pairs);
    acc.a = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(w.a, 16)), low, acc.a);
    acc.b = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(w.b, 16)), low, acc.b);
    acc.a = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(w.a, upper)), high, acc.a);
    acc.b = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(w.b, upper)), high, acc.b);
    return acc;
}
/* Ask for the cache line of p. */
PIPPIN_INLINE void prefetch(const void *p) { _mm_prefetch(static_cast<const char *>(p), _MM_HINT_T0); }

}  // namespace PIPPIN_NS

#endif
