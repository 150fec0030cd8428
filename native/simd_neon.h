/* Vectors of four registers of AArch64, with its integer dot product (ARMv8.2). See simd.h for the names. */
#ifndef PIPPIN_SIMD_NEON_H
#define PIPPIN_SIMD_NEON_H

#include <arm_neon.h>

namespace PIPPIN_NS {

#define PIPPIN_FOUR _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i)

struct i32x16 {
    int32x4_t v[4];
    static PIPPIN_MEMBER i32x16 set1(int32_t x) {
        const int32x4_t one = vdupq_n_s32(x);
        return {{one, one, one, one}};
    }
    static PIPPIN_MEMBER i32x16 zero() { return set1(0); }
};
PIPPIN_INLINE i32x16 operator+(i32x16 a, i32x16 b) {
    PIPPIN_FOUR a.v[i] = vaddq_s32(a.v[i], b.v[i]);
    return a;
}

/* 64 bytes without a sign: byte 4r + j belongs to lane r. */
struct u8x64 {
    uint8x16_t v[4];
    static PIPPIN_MEMBER u8x64 load(const void *p) {
        const uint8_t *bytes = static_cast<const uint8_t *>(p);
        return {{vld1q_u8(bytes), vld1q_u8(bytes + 16), vld1q_u8(bytes + 32), vld1q_u8(bytes + 48)}};
    }
    static PIPPIN_MEMBER u8x64 set1(uint8_t x) {
        const uint8x16_t one = vdupq_n_u8(x);
        return {{one, one, one, one}};
    }
};
PIPPIN_INLINE u8x64 and_(u8x64 a, u8x64 b) {
    PIPPIN_FOUR a.v[i] = vandq_u8(a.v[i], b.v[i]);
    return a;
}
PIPPIN_INLINE u8x64 or_(u8x64 a, u8x64 b) {
    PIPPIN_FOUR a.v[i] = vorrq_u8(a.v[i], b.v[i]);
    return a;
}
/* (a & mask) | b */
PIPPIN_INLINE u8x64 and_or(u8x64 a, u8x64 mask, u8x64 b) { return or_(and_(a, mask), b); }
/* Elsewhere bits cross from byte to byte, so a mask has to follow. */
template <int N> PIPPIN_INLINE u8x64 shift_right(u8x64 a) {
    PIPPIN_FOUR a.v[i] = vshrq_n_u8(a.v[i], N);
    return a;
}
template <int N> PIPPIN_INLINE u8x64 shift_left(u8x64 a) {
    PIPPIN_FOUR a.v[i] = vshlq_n_u8(a.v[i], N);
    return a;
}

/* acc[r] + sum_{j<4} codes[4r + j] * four[j], exact. SMALL: no code is above 127.
 * The instruction multiplies signed bytes: larger codes are lowered by 128, and 128 sum(four) is added. */
template <bool SMALL = false> PIPPIN_INLINE i32x16 dot(i32x16 acc, u8x64 codes, const int8_t *four) {
    int32_t word;
    memcpy(&word, four, 4);
    const int8x16_t by = vreinterpretq_s8_s32(vdupq_n_s32(word));
    if constexpr (SMALL) {
        PIPPIN_FOUR acc.v[i] = vdotq_s32(acc.v[i], vreinterpretq_s8_u8(codes.v[i]), by);
    } else {
        const int32x4_t lost = vshlq_n_s32(vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(1), by), 7);
        PIPPIN_FOUR {
            const int8x16_t lowered = vreinterpretq_s8_u8(veorq_u8(codes.v[i], vdupq_n_u8(128)));
            acc.v[i] = vdotq_s32(vaddq_s32(acc.v[i], lost), lowered, by);
        }
    }
    return acc;
}

/* All bits set in lanes [0, n) of the four that begin at `from`. */
PIPPIN_INLINE uint32x4_t lanes_below(int n, int from) {
    const int32x4_t index = {from, from + 1, from + 2, from + 3};
    return vcltq_s32(index, vdupq_n_s32(n));
}

struct f32x16 {
    float32x4_t v[4];
    static PIPPIN_MEMBER f32x16 loadu(const float *p) {
        return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}};
    }
    static PIPPIN_MEMBER f32x16 set1(float x) {
        const float32x4_t one = vdupq_n_f32(x);
        return {{one, one, one, one}};
    }
    static PIPPIN_MEMBER f32x16 zero() { return set1(0.f); }
    /* The first n (0 to 16) lanes from memory, the others 0; nothing beyond is read. */
    static PIPPIN_MEMBER f32x16 loadu_first(const float *p, int n) {
        float lanes[16] = {0.f};
        for (int i = 0; i < n; ++i) lanes[i] = p[i];
        return loadu(lanes);
    }
    static PIPPIN_MEMBER f32x16 from_bf16(const uint16_t *p) {
        f32x16 a;
        PIPPIN_FOUR a.v[i] = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16));
        return a;
    }
    static PIPPIN_MEMBER f32x16 from_f16(const void *p) {
        const uint8_t *bytes = static_cast<const uint8_t *>(p);
        f32x16 a;
        PIPPIN_FOUR a.v[i] = vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(bytes + 8 * i)));
        return a;
    }
    static PIPPIN_MEMBER f32x16 from_i32(i32x16 b) {
        f32x16 a;
        PIPPIN_FOUR a.v[i] = vcvtq_f32_s32(b.v[i]);
        return a;
    }
    static PIPPIN_MEMBER f32x16 from_i8(const int8_t *p) {
        const int8x16_t bytes = vld1q_s8(p);
        const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
        return from_i32({{vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)),
                          vmovl_s16(vget_high_s16(high))}});
    }
    static PIPPIN_MEMBER f32x16 from_u8(const uint8_t *p) {
        const uint8x16_t bytes = vld1q_u8(p);
        const int16x8_t low = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(bytes)));
        const int16x8_t high = vreinterpretq_s16_u16(vmovl_u8(vget_high_u8(bytes)));
        return from_i32({{vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)),
                          vmovl_s16(vget_high_s16(high))}});
    }
    PIPPIN_MEMBER void storeu(float *p) const { PIPPIN_FOUR vst1q_f32(p + 4 * i, v[i]); }
    PIPPIN_MEMBER void store_first(float *p, int n) const {
        float lanes[16];
        storeu(lanes);
        for (int i = 0; i < n; ++i) p[i] = lanes[i];
    }
    /* Round to nearest even; NaN stays NaN. */
    PIPPIN_MEMBER void to_bf16(uint16_t *p) const {
        PIPPIN_FOUR {
            const uint32x4_t bits = vreinterpretq_u32_f32(v[i]);
            const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
            const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
            const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
            vst1_u16(p + 4 * i, vshrn_n_u32(vbslq_u32(vceqq_f32(v[i], v[i]), rounded, quiet), 16));
        }
    }
    /* Round half to even, clamped to [-128, 127]; no NaN. */
    PIPPIN_MEMBER void to_i8(int8_t *p) const {
        int16x4_t words[4];
        PIPPIN_FOUR words[i] = vqmovn_s32(vcvtnq_s32_f32(v[i]));
        vst1_s8(p, vqmovn_s16(vcombine_s16(words[0], words[1])));
        vst1_s8(p + 8, vqmovn_s16(vcombine_s16(words[2], words[3])));
    }
};
#define PIPPIN_EACH(expression)           \
    f32x16 out;                           \
    PIPPIN_FOUR out.v[i] = (expression);  \
    return out
PIPPIN_INLINE f32x16 operator+(f32x16 a, f32x16 b) { PIPPIN_EACH(vaddq_f32(a.v[i], b.v[i])); }
PIPPIN_INLINE f32x16 operator-(f32x16 a, f32x16 b) { PIPPIN_EACH(vsubq_f32(a.v[i], b.v[i])); }
PIPPIN_INLINE f32x16 operator*(f32x16 a, f32x16 b) { PIPPIN_EACH(vmulq_f32(a.v[i], b.v[i])); }
PIPPIN_INLINE f32x16 operator/(f32x16 a, f32x16 b) { PIPPIN_EACH(vdivq_f32(a.v[i], b.v[i])); }
PIPPIN_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { PIPPIN_EACH(vfmaq_f32(c.v[i], a.v[i], b.v[i])); }
/* Where a lane of either is NaN: the lane of b (the instructions for it would return NaN). */
PIPPIN_INLINE float32x4_t larger(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
PIPPIN_INLINE f32x16 max(f32x16 a, f32x16 b) { PIPPIN_EACH(larger(a.v[i], b.v[i])); }
PIPPIN_INLINE f32x16 min(f32x16 a, f32x16 b) { PIPPIN_EACH(vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i])); }
PIPPIN_INLINE f32x16 abs(f32x16 a) { PIPPIN_EACH(vabsq_f32(a.v[i])); }
PIPPIN_INLINE f32x16 sqrt(f32x16 a) { PIPPIN_EACH(vsqrtq_f32(a.v[i])); }
PIPPIN_INLINE f32x16 round(f32x16 a) { PIPPIN_EACH(vrndnq_f32(a.v[i])); }
/* Lanes [0, n) of a, the others of b. */
PIPPIN_INLINE f32x16 first(int n, f32x16 a, f32x16 b) {
    PIPPIN_EACH(vbslq_f32(lanes_below(n, 4 * i), a.v[i], b.v[i]));
}
/* p * 2^n for whole n of [-252, 254], in two steps: the second one rounds where the result is subnormal. */
PIPPIN_INLINE f32x16 scale_by_power(f32x16 p, f32x16 n) {
    PIPPIN_FOUR {
        const int32x4_t whole = vcvtnq_s32_f32(n.v[i]), half = vshrq_n_s32(whole, 1);
        const int32x4_t bias = vdupq_n_s32(127), rest = vsubq_s32(whole, half);
        p.v[i] = vmulq_f32(p.v[i], vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(half, bias), 23)));
        p.v[i] = vmulq_f32(p.v[i], vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(rest, bias), 23)));
    }
    return p;
}
#undef PIPPIN_EACH
/* Lane i is paired with i + 8, then + 4, + 2, + 1: the same order in every instruction set. */
PIPPIN_INLINE float reduce_add(f32x16 a) {
    const float32x4_t four = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
PIPPIN_INLINE float reduce_max(f32x16 a) {
    float lanes[4];
    vst1q_f32(lanes, larger(larger(a.v[0], a.v[2]), larger(a.v[1], a.v[3])));
    const float even = lanes[0] > lanes[2] ? lanes[0] : lanes[2], odd = lanes[1] > lanes[3] ? lanes[1] : lanes[3];
    return even > odd ? even : odd;
}

/* acc[r] + w[2r] x[0] + w[2r + 1] x[1] in float32, of 16 pairs of bfloat16 and one pair for all lanes. */
PIPPIN_INLINE f32x16 dot_bf16(f32x16 acc, const uint16_t *pairs, uint32_t pair) {
    const uint32x4_t upper = vdupq_n_u32(0xffff0000u);
    const float32x4_t low = vreinterpretq_f32_u32(vdupq_n_u32(pair << 16));
    const float32x4_t high = vreinterpretq_f32_u32(vdupq_n_u32(pair & 0xffff0000u));
    PIPPIN_FOUR {
        const uint32x4_t w = vreinterpretq_u32_u16(vld1q_u16(pairs + 8 * i));
        acc.v[i] = vfmaq_f32(acc.v[i], vreinterpretq_f32_u32(vshlq_n_u32(w, 16)), low);
        acc.v[i] = vfmaq_f32(acc.v[i], vreinterpretq_f32_u32(vandq_u32(w, upper)), high);
    }
    return acc;
}
#undef PIPPIN_FOUR
/* Ask for the cache line of p. */
PIPPIN_INLINE void prefetch(const void *p) { __builtin_prefetch(p); }

}  // namespace PIPPIN_NS

#endif
