/* Reads matrices and activations from standard input, packs and multiplies them through the C interface, and writes the
 * rows and the products to standard output: so that test_simd.py can ask processors that are only emulated.
 * Each case: int64 format, group, rows, columns, tokens, bytes of the source, bytes of the scales; double zero; source,
 * scales, x. Each answer: the rows, then the products, float32. */
#include <stdio.h>
#include <stdlib.h>

#include <vector>

#include "pippin.h"

static bool take(void *target, size_t bytes) { return fread(target, 1, bytes, stdin) == bytes; }
static void give(const std::vector<float> &values) { fwrite(values.data(), sizeof(float), values.size(), stdout); }

static int one(const int64_t *head, double zero) {
    const int format = static_cast<int>(head[0]), group = static_cast<int>(head[1]);
    const int64_t rows = head[2], columns = head[3], tokens = head[4];
    std::vector<uint8_t> source(static_cast<size_t>(head[5]));
    std::vector<uint16_t> scales(static_cast<size_t>(head[6] / 2));
    std::vector<float> x(static_cast<size_t>(tokens * columns)), y(static_cast<size_t>(tokens * rows));
    std::vector<float> values(static_cast<size_t>(rows * columns));
    if (!take(source.data(), source.size()) || !take(scales.data(), 2 * scales.size())) return 3;
    if (!take(x.data(), sizeof(float) * x.size())) return 3;
    void *data = aligned_alloc(64, static_cast<size_t>(pippin_packed_bytes(format, group, rows, columns) + 63) / 64 * 64);
    int status;
    if (group != 0) {
        status = pippin_pack_codes(format, group, source.data(), scales.data(), rows, columns, data);
    } else if (format == PIPPIN_F32 || format == PIPPIN_BF16) {
        status = pippin_pack_dense(format, source.data(), columns, rows, columns, data);
    } else {
        status = pippin_pack_ggml(format, source.data(), rows, columns, data);
    }
    const pippin_matrix matrix = {format, group, rows, columns, static_cast<float>(zero), 0, data};
    std::vector<int64_t> ids;
    for (int64_t row = 0; row < rows; ++row) ids.push_back(row);
    if (status == 0) status = pippin_rows(&matrix, ids.data(), rows, values.data());
    if (status == 0) status = pippin_matmul(&matrix, x.data(), columns, tokens, nullptr, y.data(), rows);
    free(data);
    if (status != 0) return fprintf(stderr, "%s\n", pippin_error()), 4;
    give(values);
    give(y);
    return 0;
}

int main(int count, char **arguments) {
    if (count > 1 && pippin_use_instruction_set(arguments[1]) != 0) return fprintf(stderr, "%s\n", pippin_error()), 2;
    int64_t head[7];
    double zero;
    while (take(head, sizeof(head)) && take(&zero, sizeof(zero))) {
        if (const int status = one(head, zero)) return status;
    }
    return 0;
}
