/* Every operation of native/simd.h against plain C++; prints what is wrong and returns how much. Compiled and run by
 * test_simd.py for each instruction set. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "simd.h"

using namespace PIPPIN_NS;

static int wrong = 0;
static void check(bool good, const char *what, int lane) {
    if (!good && ++wrong < 20) printf("%s: %s, lane %d\n", PIPPIN_ISA_NAME, what, lane);
}

static uint64_t state = 1;
static uint32_t random_bits() {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<uint32_t>(state >> 32);
}
static float as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static bool same(float a, float b) { return (a != a && b != b) || memcmp(&a, &b, 4) == 0; }
/* Of a usual size, or, rarely, anything at all. */
static float random_float() {
    const uint32_t bits = random_bits();
    if (bits % 16 == 0) return as_float(random_bits());
    return ldexpf(static_cast<float>(static_cast<int32_t>(random_bits())) * 4.6566129e-10f, static_cast<int>(bits % 21) - 10);
}

struct Lanes {
    alignas(64) float v[16];
};
static Lanes lanes(f32x16 x) {
    Lanes out;
    x.storeu(out.v);
    return out;
}

static void arithmetic(const Lanes &a, const Lanes &b, const Lanes &c) {
    const f32x16 x = f32x16::loadu(a.v), y = f32x16::loadu(b.v), z = f32x16::loadu(c.v);
    const Lanes sum = lanes(x + y), less = lanes(x - y), product = lanes(x * y), ratio = lanes(x / y);
    const Lanes fused = lanes(fma(x, y, z)), most = lanes(max(x, y)), least = lanes(min(x, y)), size = lanes(abs(x));
    const Lanes chosen = lanes(first(5, x, y));
    for (int i = 0; i < 16; ++i) {
        const float p = a.v[i], q = b.v[i];
        check(same(sum.v[i], p + q), "+", i);
        check(same(less.v[i], p - q), "-", i);
        check(same(product.v[i], p * q), "*", i);
        check(same(ratio.v[i], p / q), "/", i);
        const float twice = p * q + c.v[i];
        check(same(fused.v[i], fmaf(p, q, c.v[i])) || same(fused.v[i], twice), "fma", i);
        check(same(most.v[i], p > q ? p : q), "max", i);
        check(same(least.v[i], p < q ? p : q), "min", i);
        check(same(size.v[i], fabsf(p)), "abs", i);
        check(same(chosen.v[i], i < 5 ? p : q), "first", i);
    }
}

static void reductions(const Lanes &a) {
    Lanes tree = a, most = a;
    for (int step = 8; step > 0; step /= 2) {
        for (int i = 0; i < step; ++i) {
            tree.v[i] += tree.v[i + step];
            most.v[i] = most.v[i] > most.v[i + step] ? most.v[i] : most.v[i + step];
        }
    }
    check(same(reduce_add(f32x16::loadu(a.v)), tree.v[0]), "reduce_add", 0);
    check(same(reduce_max(f32x16::loadu(a.v)), most.v[0]), "reduce_max", 0);
}

static void parts_of_memory(const Lanes &a) {
    for (int n = 0; n <= 16; ++n) {
        float *own = static_cast<float *>(malloc(sizeof(float) * static_cast<size_t>(n + 1)));  // an end to run over
        own[n] = 7.f;
        f32x16::loadu(a.v).store_first(own, n);
        check(same(own[n], 7.f), "store_first writes beyond", n);
        const Lanes back = lanes(f32x16::loadu_first(own, n));
        for (int i = 0; i < 16; ++i) check(same(back.v[i], i < n ? a.v[i] : 0.f), "loadu_first", i);
        free(own);
    }
}

static float value_of_half(uint16_t half) {
    const int exponent = (half >> 10) & 31;
    const float fraction = static_cast<float>(half & 1023), sign = half & 0x8000 ? -1.f : 1.f;
    if (exponent == 31) return half & 1023 ? NAN : sign * INFINITY;
    return sign * (exponent == 0 ? ldexpf(fraction, -24) : ldexpf(fraction + 1024.f, exponent - 25));
}
static void conversions(const Lanes &a) {
    uint16_t half[16], brain[16];
    int8_t small[16], back[16];
    uint8_t bytes[16];
    for (int i = 0; i < 16; ++i) {
        half[i] = static_cast<uint16_t>(random_bits());
        small[i] = static_cast<int8_t>(random_bits());
        bytes[i] = static_cast<uint8_t>(random_bits());
    }
    Lanes safe = a;
    for (int i = 0; i < 16; ++i) safe.v[i] = fabsf(a.v[i]) < 1e6f ? a.v[i] : static_cast<float>(i) * 20.5f - 160.f;
    const Lanes from_half = lanes(f32x16::from_f16(half)), from_brain = lanes(f32x16::from_bf16(half));
    const Lanes from_small = lanes(f32x16::from_i8(small)), from_bytes = lanes(f32x16::from_u8(bytes));
    const Lanes whole = lanes(round(f32x16::loadu(safe.v)));
    f32x16::loadu(a.v).to_bf16(brain);
    f32x16::loadu(safe.v).to_i8(back);
    for (int i = 0; i < 16; ++i) {
        check(same(from_half.v[i], value_of_half(half[i])), "from_f16", i);
        check(same(from_brain.v[i], as_float(static_cast<uint32_t>(half[i]) << 16)), "from_bf16", i);
        check(from_small.v[i] == small[i] && from_bytes.v[i] == bytes[i], "from_i8, from_u8", i);
        check(whole.v[i] == nearbyintf(safe.v[i]), "round", i);
        check(back[i] == fminf(127.f, fmaxf(-128.f, nearbyintf(safe.v[i]))), "to_i8", i);
        const float rounded = as_float(static_cast<uint32_t>(brain[i]) << 16);
        if (a.v[i] != a.v[i]) {
            check(rounded != rounded, "to_bf16 of NaN", i);
        } else if (fabsf(a.v[i]) < 3e38f && a.v[i] != 0.f) {
            int exponent;
            frexp(a.v[i], &exponent);
            const double step = ldexp(1., (exponent < -125 ? -125 : exponent) - 8);
            check(rounded == static_cast<float>(nearbyint(a.v[i] / step) * step), "to_bf16", i);
        }
    }
}

template <bool SMALL> static void products() {
    alignas(64) uint8_t codes[64];
    int8_t four[4];
    for (uint8_t &code : codes) code = static_cast<uint8_t>(random_bits() % 3 ? random_bits() : 255) & (SMALL ? 127 : 255);
    for (int8_t &x : four) x = static_cast<int8_t>(random_bits() % 3 ? random_bits() : random_bits() % 2 ? 127 : -128);
    const Lanes found = lanes(f32x16::from_i32(dot<SMALL>(i32x16::set1(-1000), u8x64::load(codes), four)));
    for (int r = 0; r < 16; ++r) {
        int sum = -1000;
        for (int j = 0; j < 4; ++j) sum += codes[4 * r + j] * four[j];
        check(found.v[r] == static_cast<float>(sum), SMALL ? "dot of small codes" : "dot", r);
    }
}
/* Bytes through the integer product, which adds 64 of one of four bytes at a time. */
static void bytes_are(u8x64 x, const uint8_t *expected, const char *what) {
    for (int j = 0; j < 4; ++j) {
        int8_t one[4] = {0, 0, 0, 0};
        one[j] = 1;
        const Lanes found = lanes(f32x16::from_i32(dot(i32x16::zero(), x, one)));
        for (int r = 0; r < 16; ++r) check(found.v[r] == expected[4 * r + j], what, r);
    }
}
static void bit_fields() {
    uint8_t a[64], b[64], expected[64];
    for (int i = 0; i < 64; ++i) a[i] = static_cast<uint8_t>(random_bits()), b[i] = static_cast<uint8_t>(random_bits());
    const u8x64 x = u8x64::load(a), y = u8x64::load(b), mask = u8x64::set1(0x30);
    for (int i = 0; i < 64; ++i) expected[i] = a[i] & b[i];
    bytes_are(and_(x, y), expected, "and_");
    for (int i = 0; i < 64; ++i) expected[i] = a[i] | b[i];
    bytes_are(or_(x, y), expected, "or_");
    for (int i = 0; i < 64; ++i) expected[i] = (a[i] & 0x30) | b[i];
    bytes_are(and_or(x, mask, y), expected, "and_or");
    for (int i = 0; i < 64; ++i) expected[i] = (a[i] >> 2) & 0x30;
    bytes_are(and_(shift_right<2>(x), mask), expected, "shift_right");
    for (int i = 0; i < 64; ++i) expected[i] = static_cast<uint8_t>(a[i] << 3) & 0x30;
    bytes_are(and_(shift_left<3>(x), mask), expected, "shift_left");
}

static void brain_pairs() {
    uint16_t pairs[32], two[2];
    for (uint16_t &x : pairs) x = static_cast<uint16_t>(0x3e00 + random_bits() % 0x300 + (random_bits() & 0x8000));
    for (uint16_t &x : two) x = static_cast<uint16_t>(0x3e00 + random_bits() % 0x300 + (random_bits() & 0x8000));
    uint32_t pair;
    memcpy(&pair, two, 4);
    const Lanes found = lanes(dot_bf16(f32x16::set1(0.75f), pairs, pair));
    for (int r = 0; r < 16; ++r) {
        double sum = 0.75, size = 0.75;
        for (int j = 0; j < 2; ++j) {
            const double term = static_cast<double>(as_float(static_cast<uint32_t>(pairs[2 * r + j]) << 16)) *
                                as_float(static_cast<uint32_t>(two[j]) << 16);
            sum += term;
            size += fabs(term);
        }
        check(fabs(found.v[r] - sum) <= 3 * ldexp(size, -24), "dot_bf16", r);
    }
}

/* All floats but for gaps of 9,973. */
static void exponential() {
    for (uint64_t start = 0; start < (1ull << 32); start += 16 * 9973) {
        Lanes x;
        for (int i = 0; i < 16; ++i) x.v[i] = as_float(static_cast<uint32_t>(start + 9973ull * static_cast<uint64_t>(i)));
        const Lanes y = lanes(exp(f32x16::loadu(x.v)));
        for (int i = 0; i < 16; ++i) {
            const double exact = ::exp(static_cast<double>(x.v[i]));
            const float nearest = static_cast<float>(exact);
            if (x.v[i] != x.v[i]) {
                check(y.v[i] != y.v[i], "exp of NaN", i);
            } else if (isinf(nearest)) {
                check(isinf(y.v[i]) && y.v[i] > 0, "exp of large numbers", i);
            } else {
                const double unit = fmax(nextafterf(nearest, INFINITY) - nearest, 1.5e-45);
                check(fabs(y.v[i] - exact) <= 2 * unit, "exp", i);
            }
        }
    }
    const Lanes ends = lanes(exp(f32x16::set1(-INFINITY)));
    check(ends.v[0] == 0.f, "exp of -infinity", 0);
    check(lanes(exp(f32x16::zero())).v[3] == 1.f, "exp of 0", 3);
}

int main() {
    for (int turn = 0; turn < 20000; ++turn) {
        Lanes a, b, c;
        for (int i = 0; i < 16; ++i) a.v[i] = random_float(), b.v[i] = random_float(), c.v[i] = random_float();
        arithmetic(a, b, c);
        reductions(a);
        conversions(a);
        products<false>();
        products<true>();
        bit_fields();
        brain_pairs();
        if (turn < 10) parts_of_memory(a);
    }
    exponential();
    return wrong > 255 ? 255 : wrong;
}
