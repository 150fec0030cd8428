/* pippin_matmul: prepare the activations once, then hand out panels to the threads. */
#include "matmul.h"

#include "formats.h"
#include "kernels.h"
#include "library.h"
#include "memory.h"
#include "threads.h"

namespace pippin {

ActivationKind activation_kind(int format) {
    if (format == PIPPIN_F32) return ActivationKind::Float32;
    return format == PIPPIN_BF16 ? ActivationKind::BFloat16 : ActivationKind::Int8;
}

int64_t activation_bytes(ActivationKind kind, int64_t tokens, int64_t columns) {
    if (kind == ActivationKind::Float32) return 0;
    if (kind == ActivationKind::BFloat16) return tokens * (columns + (columns & 1)) * int64_t(sizeof(uint16_t));
    return tokens * (columns / kUnit) * int64_t(sizeof(Record));
}

namespace {

thread_local Memory activations_memory;

int check(const pippin_matrix *weight, const float *x, int64_t x_stride, int64_t tokens, const float *y,
          int64_t y_stride) {
    if (weight == nullptr || weight->data == nullptr) return fail(PIPPIN_BAD_ARGUMENT, "the matrix has no data");
    if (pippin_packed_bytes(weight->format, weight->group, weight->rows, weight->columns) < 0) {
        return PIPPIN_BAD_ARGUMENT;
    }
    if (reinterpret_cast<uintptr_t>(weight->data) % 64 != 0) {
        return fail(PIPPIN_BAD_ARGUMENT, "the packed weight does not begin at a multiple of 64 bytes");
    }
    if (tokens < 0) return fail(PIPPIN_BAD_ARGUMENT, "tokens is %lld, and must not be negative", (long long)tokens);
    if (tokens > 0 && (x == nullptr || y == nullptr)) return fail(PIPPIN_BAD_ARGUMENT, "x or y is NULL");
    if (tokens > 1 && (x_stride < weight->columns || y_stride < weight->rows)) {
        return fail(PIPPIN_BAD_ARGUMENT, "strides %lld and %lld are below the %lld inputs and %lld outputs",
                    (long long)x_stride, (long long)y_stride, (long long)weight->columns, (long long)weight->rows);
    }
    return PIPPIN_OK;
}

}  // namespace
}  // namespace pippin

extern "C" int pippin_matmul(const pippin_matrix *weight, const float *x, int64_t x_stride, int64_t tokens,
                             const float *bias, float *y, int64_t y_stride) try {
    using namespace pippin;
    const int bad = check(weight, x, x_stride, tokens, y, y_stride);
    if (bad != PIPPIN_OK || tokens == 0) return bad;
    const KernelTable &table = kernels();
    const ActivationKind kind = activation_kind(weight->format);
    const int64_t bytes = activation_bytes(kind, tokens, weight->columns);
    void *buffer = activations_memory.get(bytes);
    const auto view = [&](int64_t begin, int64_t end) {
        return table.prepare(kind, x, x_stride, tokens, weight->columns, buffer, begin, end);
    };
    if (bytes > 0) parallel(tokens, 16, [&](int64_t begin, int64_t end, int) { view(begin, end); });
    const Activations activations = view(0, 0);
    const int64_t panels = panel_count(weight->rows);
    parallel(panels, chunk_of(panels, 1), [&](int64_t begin, int64_t end, int) {
        table.matmul_panels(*weight, activations, begin, end, y, y_stride, bias);
    });
    activations_memory.trim();
    return PIPPIN_OK;
} catch (const std::bad_alloc &) {
    return pippin::fail(PIPPIN_NO_MEMORY, "no memory for the activations of %lld tokens", (long long)tokens);
}
