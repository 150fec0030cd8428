/* Vectors as plain arrays: for every machine with a C++ compiler. See simd.h for the names.
 *
 * Notable here:
 * - `fma` rounds twice, since machines without a fused instruction would call a slow function for it
 * - only the integer product is written with instructions, where SSE2 is there: no compiler finds them
 */
#ifndef PIPPIN_SIMD_GENERIC_H
#define PIPPIN_SIMD_GENERIC_H

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace PIPPIN_NS {

struct i32x16 {
    int32_t v[16];
    static PIPPIN_MEMBER i32x16 zero() { return set1(0); }
    static PIPPIN_MEMBER i32x16 set1(int32_t x) {
        i32x16 a;
        for (int i = 0; i < 16; ++i) a.v[i] = x;
        return a;
    }
};
PIPPIN_INLINE i32x16 operator+(i32x16 a, i32x16 b) {
    for (int i = 0; i < 16; ++i) a.v[i] += b.v[i];
    return a;
}

/* 64 bytes without a sign: byte 4r + j belongs to lane r. */
struct u8x64 {
    uint64_t v[8];
    static PIPPIN_MEMBER u8x64 load(const void *p) {
        u8x64 a;
        memcpy(a.v, p, 64);
        return a;
    }
    static PIPPIN_MEMBER u8x64 set1(uint8_t x) {
        u8x64 a;
        for (int i = 0; i < 8; ++i) a.v[i] = x * 0x0101010101010101ull;
        return a;
    }
};
PIPPIN_INLINE u8x64 and_(u8x64 a, u8x64 b) {
    for (int i = 0; i < 8; ++i) a.v[i] &= b.v[i];
    return a;
}
PIPPIN_INLINE u8x64 or_(u8x64 a, u8x64 b) {
    for (int i = 0; i < 8; ++i) a.v[i] |= b.v[i];
    return a;
}
/* (a & mask) | b */
PIPPIN_INLINE u8x64 and_or(u8x64 a, u8x64 mask, u8x64 b) { return or_(and_(a, mask), b); }
/* Bits cross from byte to byte, so a mask has to follow. */
template <int N> PIPPIN_INLINE u8x64 shift_right(u8x64 a) {
    for (int i = 0; i < 8; ++i) a.v[i] >>= N;
    return a;
}
template <int N> PIPPIN_INLINE u8x64 shift_left(u8x64 a) {
    for (int i = 0; i < 8; ++i) a.v[i] <<= N;
    return a;
}

/* acc[r] + sum_{j<4} codes[4r + j] * four[j], exact. SMALL: no code is above 127. */
template <bool SMALL = false> PIPPIN_INLINE i32x16 dot(i32x16 acc, u8x64 codes, const int8_t *four) {
#if defined(__SSE2__)
    // Even and odd bytes as 16-bit numbers, whose products an instruction of every x86-64 adds in pairs.
    const __m128i even = _mm_set1_epi32((four[2] * 65536) | (four[0] & 0xffff));
    const __m128i odd = _mm_set1_epi32((four[3] * 65536) | (four[1] & 0xffff));
    for (int i = 0; i < 4; ++i) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(codes.v) + i);
        __m128i *sums = reinterpret_cast<__m128i *>(acc.v) + i;
        const __m128i low = _mm_madd_epi16(_mm_and_si128(bytes, _mm_set1_epi16(255)), even);
        const __m128i high = _mm_madd_epi16(_mm_srli_epi16(bytes, 8), odd);
        _mm_storeu_si128(sums, _mm_add_epi32(_mm_loadu_si128(sums), _mm_add_epi32(low, high)));
    }
#else
    uint8_t bytes[64];
    memcpy(bytes, codes.v, 64);
    for (int r = 0; r < 16; ++r) {
        acc.v[r] += bytes[4 * r] * four[0] + bytes[4 * r + 1] * four[1] + bytes[4 * r + 2] * four[2] +
                    bytes[4 * r + 3] * four[3];
    }
#endif
    return acc;
}

PIPPIN_INLINE float bits_to_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
PIPPIN_INLINE uint32_t float_to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
/* The float32 of a half: exponents are shifted by multiplying with 2^112, which also makes subnormals right. */
PIPPIN_INLINE float half_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t rest = static_cast<uint32_t>(half & 0x7fffu) << 13;
    const uint32_t special = (half & 0x7c00u) == 0x7c00u ? 0x7f800000u | (rest & 0x7fffffu) : 0;
    const uint32_t value = float_to_bits(bits_to_float(rest) * bits_to_float(0x77800000u));
    return bits_to_float(sign | (special != 0 ? special : value));
}

struct f32x16 {
    float v[16];
    static PIPPIN_MEMBER f32x16 loadu(const float *p) {
        f32x16 a;
        memcpy(a.v, p, 64);
        return a;
    }
    static PIPPIN_MEMBER f32x16 set1(float x) {
        f32x16 a;
        for (int i = 0; i < 16; ++i) a.v[i] = x;
        return a;
    }
    static PIPPIN_MEMBER f32x16 zero() { return set1(0.f); }
    /* The first n (0 to 16) lanes from memory, the others 0; nothing beyond is read. */
    static PIPPIN_MEMBER f32x16 loadu_first(const float *p, int n) {
        f32x16 a = zero();
        for (int i = 0; i < n; ++i) a.v[i] = p[i];
        return a;
    }
    static PIPPIN_MEMBER f32x16 from_bf16(const uint16_t *p) {
        f32x16 a;
        for (int i = 0; i < 16; ++i) a.v[i] = bits_to_float(static_cast<uint32_t>(p[i]) << 16);
        return a;
    }
    static PIPPIN_MEMBER f32x16 from_f16(const void *p) {
        uint16_t half[16];
        memcpy(half, p, 32);
        f32x16 a;
        for (int i = 0; i < 16; ++i) a.v[i] = half_to_float(half[i]);
        return a;
    }
    static PIPPIN_MEMBER f32x16 from_i32(i32x16 b) {
        f32x16 a;
        for (int i = 0; i < 16; ++i) a.v[i] = static_cast<float>(b.v[i]);
        return a;
    }
    static PIPPIN_MEMBER f32x16 from_i8(const int8_t *p) {
        f32x16 a;
        for (int i = 0; i < 16; ++i) a.v[i] = static_cast<float>(p[i]);
        return a;
    }
    static PIPPIN_MEMBER f32x16 from_u8(const uint8_t *p) {
        f32x16 a;
        for (int i = 0; i < 16; ++i) a.v[i] = static_cast<float>(p[i]);
        return a;
    }
    PIPPIN_MEMBER void storeu(float *p) const { memcpy(p, v, 64); }
    PIPPIN_MEMBER void store_first(float *p, int n) const {
        for (int i = 0; i < n; ++i) p[i] = v[i];
    }
    /* Round to nearest even; NaN stays NaN. */
    PIPPIN_MEMBER void to_bf16(uint16_t *p) const {
        for (int i = 0; i < 16; ++i) {
            const uint32_t bits = float_to_bits(v[i]);
            const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
            p[i] = static_cast<uint16_t>((v[i] != v[i] ? bits | 0x400000u : rounded) >> 16);
        }
    }
    /* Round half to even, clamped to [-128, 127]; no NaN. */
    PIPPIN_MEMBER void to_i8(int8_t *p) const {
        for (int i = 0; i < 16; ++i) {
            const float x = v[i] < -128.f ? -128.f : v[i] > 127.f ? 127.f : v[i];
            p[i] = static_cast<int8_t>((x + 12582912.f) - 12582912.f);  // 1.5 * 2^23: no bits are left behind the point
        }
    }
};
#define PIPPIN_EACH(expression)                            \
    f32x16 out;                                            \
    for (int i = 0; i < 16; ++i) out.v[i] = (expression);  \
    return out
PIPPIN_INLINE f32x16 operator+(f32x16 a, f32x16 b) { PIPPIN_EACH(a.v[i] + b.v[i]); }
PIPPIN_INLINE f32x16 operator-(f32x16 a, f32x16 b) { PIPPIN_EACH(a.v[i] - b.v[i]); }
PIPPIN_INLINE f32x16 operator*(f32x16 a, f32x16 b) { PIPPIN_EACH(a.v[i] * b.v[i]); }
PIPPIN_INLINE f32x16 operator/(f32x16 a, f32x16 b) { PIPPIN_EACH(a.v[i] / b.v[i]); }
PIPPIN_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { PIPPIN_EACH(a.v[i] * b.v[i] + c.v[i]); }
/* Where a lane of either is NaN: the lane of b. */
PIPPIN_INLINE f32x16 max(f32x16 a, f32x16 b) { PIPPIN_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
PIPPIN_INLINE f32x16 min(f32x16 a, f32x16 b) { PIPPIN_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
PIPPIN_INLINE f32x16 abs(f32x16 a) { PIPPIN_EACH(__builtin_fabsf(a.v[i])); }
/* To whole numbers, half to even; |a| < 2^22. */
PIPPIN_INLINE f32x16 sqrt(f32x16 a) { PIPPIN_EACH(__builtin_sqrtf(a.v[i])); }
PIPPIN_INLINE f32x16 round(f32x16 a) { PIPPIN_EACH((a.v[i] + 12582912.f) - 12582912.f); }
#undef PIPPIN_EACH
/* Lanes [0, n) of a, the others of b. */
PIPPIN_INLINE f32x16 first(int n, f32x16 a, f32x16 b) {
    for (int i = 0; i < n; ++i) b.v[i] = a.v[i];
    return b;
}
/* p * 2^n for whole n of [-252, 254]; p in [0.5, 2). */
PIPPIN_INLINE f32x16 scale_by_power(f32x16 p, f32x16 n) {
    for (int i = 0; i < 16; ++i) {
        const int32_t whole = n.v[i] == n.v[i] ? static_cast<int32_t>(n.v[i]) : 0;
        const int32_t half = whole >> 1;
        p.v[i] *= bits_to_float(static_cast<uint32_t>(half + 127) << 23);
        p.v[i] *= bits_to_float(static_cast<uint32_t>(whole - half + 127) << 23);
    }
    return p;
}
/* Lane i is paired with i + 8, then + 4, + 2, + 1: the same order in every instruction set. */
PIPPIN_INLINE float reduce_add(f32x16 a) {
    for (int step = 8; step > 0; step >>= 1) {
        for (int i = 0; i < step; ++i) a.v[i] += a.v[i + step];
    }
    return a.v[0];
}
PIPPIN_INLINE float reduce_max(f32x16 a) {
    for (int step = 8; step > 0; step >>= 1) {
        for (int i = 0; i < step; ++i) a.v[i] = a.v[i] > a.v[i + step] ? a.v[i] : a.v[i + step];
    }
    return a.v[0];
}

/* acc[r] + w[2r] x[0] + w[2r + 1] x[1] in float32, of 16 pairs of bfloat16 and one pair for all lanes. */
PIPPIN_INLINE f32x16 dot_bf16(f32x16 acc, const uint16_t *pairs, uint32_t pair) {
    const float low = bits_to_float(pair << 16), high = bits_to_float(pair & 0xffff0000u);
    for (int i = 0; i < 16; ++i) {
        acc.v[i] = bits_to_float(static_cast<uint32_t>(pairs[2 * i]) << 16) * low + acc.v[i];
        acc.v[i] = bits_to_float(static_cast<uint32_t>(pairs[2 * i + 1]) << 16) * high + acc.v[i];
    }
    return acc;
}
/* Ask for the cache line of p. */
PIPPIN_INLINE void prefetch(const void *p) { __builtin_prefetch(p); }

}  // namespace PIPPIN_NS

#endif
