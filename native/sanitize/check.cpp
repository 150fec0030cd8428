/* Packs, multiplies and decodes with every format, cache and number of threads: to be run under sanitizers
 * (tools/sanitize.sh), which see what tests from Python cannot.
 *
 * Notable here:
 * - all memory that the library is given is exactly as large as the interface says
 * - results are compared between threads and ways of cutting, so that the work cannot be optimized away
 */
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../pippin.h"

namespace {

uint64_t seed = 1;

float uniform() { // in [-1, 1)
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    return float(int64_t(seed) >> 40) / float(1 << 23);
}

std::vector<float> vector_of(int64_t count, float around = 0.f) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float &value : values) value = around + 0.3f * uniform();
    return values;
}

void require(bool holds, const std::string &what) {
    if (holds) return;
    std::fprintf(stderr, "failed: %s (%s)\n", what.c_str(), pippin_error());
    std::exit(1);
}

struct Free {
    void operator()(void *memory) const { std::free(memory); }
};
using Bytes = std::unique_ptr<uint8_t, Free>;

/* Exactly `size` bytes at a multiple of 64. */
Bytes bytes_of(int64_t size) {
    void *memory = nullptr;
    require(posix_memalign(&memory, 64, size_t(size)) == 0, "memory");
    return Bytes(static_cast<uint8_t *>(memory));
}

struct Weight {
    Bytes data;
    pippin_matrix matrix;
};

/* Blocks of ggml with random codes and a scale of about 1/32. */
std::vector<uint8_t> ggml_blocks(int format, int64_t rows, int64_t columns) {
    const bool wide = format >= PIPPIN_Q4_K;
    const int64_t count = rows * (columns / (wide ? 256 : 32));
    const int64_t sizes[15] = {0, 0, 18, 20, 0, 0, 22, 24, 34, 0, 0, 0, 144, 176, 210};
    const int64_t size = sizes[format];
    std::vector<uint8_t> blocks(size_t(count * size));
    for (uint8_t &byte : blocks) byte = uint8_t(int(uniform() * 128.f) + 128);
    const uint16_t half = 0x2800; // 1/32
    for (int64_t block = 0; block < count; ++block) {
        uint8_t *at = blocks.data() + block * size;
        if (format == PIPPIN_Q6_K) at += 208;
        memcpy(at, &half, 2);
        if (format == PIPPIN_Q4_1 || format == PIPPIN_Q5_1 || format == PIPPIN_Q4_K || format == PIPPIN_Q5_K)
            memcpy(at + 2, &half, 2);
    }
    return blocks;
}

Weight weight_of(int format, int64_t rows, int64_t columns, int group = 0) {
    const int64_t size = pippin_packed_bytes(format, group, rows, columns);
    require(size >= 0, "packed bytes");
    Weight weight{bytes_of(size), {format, group, rows, columns, 0.f, 0, nullptr}};
    weight.matrix.data = weight.data.get();
    if (format == PIPPIN_F32) {
        const auto values = vector_of(rows * columns);
        require(pippin_pack_dense(format, values.data(), columns, rows, columns, weight.data.get()) == 0, "pack");
    } else if (format == PIPPIN_BF16) {
        std::vector<uint16_t> values;
        for (float value : vector_of(rows * columns)) {
            uint32_t bits;
            memcpy(&bits, &value, 4);
            values.push_back(uint16_t(bits >> 16));
        }
        require(pippin_pack_dense(format, values.data(), columns, rows, columns, weight.data.get()) == 0, "pack");
    } else if (format >= PIPPIN_INT2) {
        const bool affine = format >= PIPPIN_AFFINE2;
        const int bits = format % 100;
        const float middle = float((1 << bits) - 1) / 2.f;
        weight.matrix.zero = affine ? 0.f : middle;
        std::vector<uint8_t> codes(size_t(rows * columns));
        for (uint8_t &code : codes) code = uint8_t(int((uniform() + 1.f) * 128.f) & ((1 << bits) - 1));
        const size_t groups = size_t(rows * (columns / group));
        const std::vector<uint16_t> scales(groups, 0x2400); // 1/64
        const std::vector<float> wide(groups, 1.f / 64.f), minima(groups, -middle / 64.f);
        require(affine ? pippin_pack_affine(format, group, codes.data(), wide.data(), minima.data(), rows, columns,
                                            weight.data.get()) == 0 :
                         pippin_pack_codes(format, group, codes.data(), scales.data(), rows, columns,
                                           weight.data.get()) == 0,
                "pack");
    } else {
        const auto blocks = ggml_blocks(format, rows, columns);
        require(pippin_pack_ggml(format, blocks.data(), rows, columns, weight.data.get()) == 0, "pack");
    }
    return weight;
}

/* A product against the sum over the matrix's rows, and the same to the bit for one token and for many. */
void check_product(int format, int64_t rows, int64_t columns, int group) {
    const Weight weight = weight_of(format, rows, columns, group);
    const int64_t tokens = 21;
    const auto x = vector_of(tokens * columns), bias = vector_of(rows);
    std::vector<float> y(size_t(tokens * rows)), one(static_cast<size_t>(rows));
    std::vector<int64_t> ids;
    for (int64_t row = 0; row < rows; ++row) ids.push_back(row);
    std::vector<float> values(size_t(rows * columns));
    require(pippin_rows(&weight.matrix, ids.data(), rows, values.data()) == 0, "rows");
    require(pippin_matmul(&weight.matrix, x.data(), columns, tokens, bias.data(), y.data(), rows) == 0, "matmul");
    for (int64_t token = 0; token < tokens; ++token) {
        require(pippin_matmul(&weight.matrix, x.data() + token * columns, columns, 1, bias.data(), one.data(), rows) == 0,
                "matmul of one token");
        require(memcmp(one.data(), y.data() + token * rows, size_t(rows) * 4) == 0, "one token as among many");
        for (int64_t row = 0; row < rows; ++row) {
            double sum = bias[size_t(row)], size = 0;
            for (int64_t i = 0; i < columns; ++i) {
                const double term = double(values[size_t(row * columns + i)]) * x[size_t(token * columns + i)];
                sum += term, size += std::fabs(term);
            }
            require(std::fabs(sum - one[size_t(row)]) <= 0.02 * size + 1e-3, "a product of format " + std::to_string(format));
        }
    }
}

struct Decoder {
    std::vector<Weight> weights;
    std::vector<std::vector<float>> vectors;
    std::vector<pippin_expert> experts;
    std::vector<pippin_matrix> heads;
    std::vector<std::unique_ptr<pippin_recurrent>> recurrent;
    std::unique_ptr<pippin_latent> latent;
    pippin_config config{};
    std::vector<int64_t> state_sizes; // of each recurrent layer
    int32_t groups = 1, axes = 0, rotary_dim = 24;
    pippin_model *model = nullptr;
    ~Decoder() { pippin_model_free(model); }

    pippin_matrix matrix(int format, int64_t rows, int64_t columns) {
        weights.push_back(weight_of(format, rows, columns, format >= PIPPIN_INT2 ? 32 : 0));
        return weights.back().matrix;
    }
    const float *vector(int64_t count, float around = 0.f) {
        vectors.push_back(vector_of(count, around));
        return vectors.back().data();
    }
};

constexpr int64_t WIDTH = 64, HEADS = 6, KV_HEADS = 2, HEAD_DIM = 24, SIZE = 96, VOCAB = 77, POSITIONS = 700;

void rotate(Decoder &decoder) {
    std::vector<float> cos, sin;
    const int64_t half = decoder.config.rotary_dims[0] / 2;
    for (int64_t position = 0; position < POSITIONS; ++position)
        for (int64_t pair = 0; pair < half; ++pair) {
            const double angle = double(position) * std::pow(10000.0, -double(pair) / double(half));
            cos.push_back(float(std::cos(angle))), sin.push_back(float(std::sin(angle)));
        }
    require(pippin_model_rope(decoder.model, 0, cos.data(), sin.data(), POSITIONS) == 0, "rotary tables");
    if (decoder.axes == 0) return;
    std::vector<uint8_t> axes(static_cast<size_t>(half));
    for (size_t i = 0; i < axes.size(); ++i) axes[i] = uint8_t(i % 2);
    require(pippin_model_rope_axes(decoder.model, 0, axes.data()) == 0, "axes");
}

void open(Decoder &decoder, std::vector<pippin_layer> layers) {
    pippin_config &config = decoder.config;
    for (pippin_layer &layer : layers) layer.scalar = 0.9f;
    config.vocab = VOCAB, config.width = WIDTH, config.layers = int64_t(layers.size()), config.eps = 1e-5f;
    config.rotary_dims = &decoder.rotary_dim;
    config.attention_scale = 0.2f, config.embedding_scale = 2.f, config.rope_tables = 1;
    config.embedding = decoder.matrix(PIPPIN_INT8, VOCAB, WIDTH);
    config.head = config.embedding;
    config.final_norm = decoder.vector(WIDTH, 1.f);
    if (config.norm == PIPPIN_LAYER_NORM) config.final_norm_bias = decoder.vector(WIDTH);
    decoder.model = pippin_model_new(&config, layers.data());
    require(decoder.model != nullptr, "model");
    rotate(decoder);
}

void attend(Decoder &decoder, pippin_layer &layer, int format) {
    const int64_t q = HEADS * HEAD_DIM, kv = KV_HEADS * HEAD_DIM;
    layer.q = decoder.matrix(format, q, WIDTH);
    layer.output = decoder.matrix(q % 32 == 0 || format == PIPPIN_BF16 ? format : PIPPIN_F32, WIDTH, q);
    if (layer.source >= 0) return;
    layer.k = decoder.matrix(format, kv, WIDTH);
    layer.v = decoder.matrix(PIPPIN_F32, kv, WIDTH);
    layer.k_bias = decoder.vector(kv);
}

void feed(Decoder &decoder, pippin_layer &layer, int format, bool gated) {
    if (gated) layer.gate = decoder.matrix(format, SIZE, WIDTH);
    layer.up = decoder.matrix(format, SIZE, WIDTH);
    layer.down = decoder.matrix(format, WIDTH, SIZE);
}

void mix(Decoder &decoder, pippin_layer &layer, int32_t experts, int32_t active) {
    layer.experts = experts, layer.active = active;
    layer.router = pippin_router{};
    layer.router.weight = decoder.vector(experts * WIDTH);
    layer.router.groups = layer.router.active_groups = layer.router.normalize = 1, layer.router.scale = 1.f;
    const size_t first = decoder.experts.size();
    for (int32_t e = 0; e < experts; ++e)
        decoder.experts.push_back({decoder.matrix(PIPPIN_INT8, SIZE, WIDTH), decoder.matrix(PIPPIN_Q8_0, SIZE, WIDTH),
                                   decoder.matrix(PIPPIN_INT3, WIDTH, SIZE), nullptr, nullptr, nullptr});
    layer.expert = decoder.experts.data() + first;
}

/* Four layers of the oldest kind: shared keys, a window with a table of its own, norms after, experts. */
void describe_plain(Decoder &decoder) {
    decoder.config.heads = HEADS, decoder.config.kv_heads = KV_HEADS;
    decoder.config.head_dim = HEAD_DIM;
    decoder.config.residual_scale = decoder.config.logit_scale = 1.f;
    const int formats[4] = {PIPPIN_INT4, PIPPIN_BF16, PIPPIN_Q4_1, PIPPIN_INT2};
    std::vector<pippin_layer> layers(4);
    for (int l = 0; l < 4; ++l) {
        pippin_layer &layer = layers[size_t(l)] = pippin_layer{};
        layer.source = l == 1 ? 0 : -1;
        attend(decoder, layer, formats[l]);
        layer.attention_norm = decoder.vector(WIDTH, 1.f);
        layer.feedforward_norm = decoder.vector(WIDTH, 1.f);
        if (l == 2) {
            layer.q_norm = decoder.vector(HEAD_DIM, 1.f), layer.k_norm = decoder.vector(HEAD_DIM, 1.f);
            layer.post_attention_norm = decoder.vector(WIDTH, 1.f);
            layer.post_feedforward_norm = decoder.vector(WIDTH, 1.f);
            layer.group = 1;
        }
        if (l == 0) {
            layer.input_gate = decoder.matrix(PIPPIN_INT4, 8, WIDTH);
            layer.input_projection = decoder.matrix(PIPPIN_F32, WIDTH, 8);
            layer.input_norm = decoder.vector(WIDTH, 1.f);
        }
        layer.window = l == 2 ? 37 : 0;
        layer.rope = l == 3 ? -1 : 0;
        layer.activation = l;
        if (l == 3) {
            mix(decoder, layer, 3, 2);
            layer.experts_norm = decoder.vector(WIDTH, 1.f), layer.post_experts_norm = decoder.vector(WIDTH, 1.f);
            layer.post_dense_norm = decoder.vector(WIDTH, 1.f);
            layer.router.input_norm = decoder.vector(WIDTH, 1.f), layer.router.expert_scale = decoder.vector(3, 1.f);
        }
        feed(decoder, layer, formats[l], l != 1);
    }
    decoder.config.layer_table = decoder.matrix(PIPPIN_INT8, VOCAB, 32);
    decoder.config.layer_projection = decoder.matrix(PIPPIN_BF16, 32, WIDTH);
    decoder.config.layer_input_norm = decoder.vector(8, 1.f);
    decoder.groups = 2;
    open(decoder, layers);
}

/* What other families have: layer norms, parallel parts, gates, sinks, bounds, biases, groups of experts, positions. */
void describe_rich(Decoder &decoder) {
    pippin_config &config = decoder.config;
    config.heads = HEADS, config.kv_heads = KV_HEADS, config.head_dim = HEAD_DIM;
    config.norm = PIPPIN_LAYER_NORM, config.residual_scale = 0.7f, config.logit_scale = 0.5f, config.logit_softcap = 5.f;
    config.head_bias = decoder.vector(VOCAB), config.embedding_norm = decoder.vector(WIDTH, 1.f);
    config.position = decoder.matrix(PIPPIN_F32, POSITIONS, WIDTH);
    decoder.axes = 2;
    decoder.experts.reserve(8);
    std::vector<pippin_layer> layers(3);
    for (int l = 0; l < 3; ++l) {
        pippin_layer &layer = layers[size_t(l)] = pippin_layer{};
        layer.source = -1, layer.qk_norm = l, layer.softcap = 3.f * float(l), layer.parallel = l > 0;
        attend(decoder, layer, PIPPIN_BF16);
        layer.attention_gate = decoder.matrix(PIPPIN_INT4, HEADS * HEAD_DIM, WIDTH);
        layer.sinks = decoder.vector(HEADS);
        const int64_t normed = l == PIPPIN_NORM_ALL_HEADS ? HEADS * HEAD_DIM : HEAD_DIM;
        layer.q_norm = decoder.vector(normed, 1.f), layer.k_norm = decoder.vector(normed, 1.f);
        layer.v_norm = decoder.vector(HEAD_DIM, 1.f);
        layer.position_beta = 0.1f, layer.position_length = 50;
        layer.attention_norm = decoder.vector(WIDTH, 1.f), layer.attention_norm_bias = decoder.vector(WIDTH);
        if (l != 1) layer.feedforward_norm = decoder.vector(WIDTH, 1.f), layer.feedforward_norm_bias = decoder.vector(WIDTH);
        layer.activation = PIPPIN_RELU2 + l;
        layer.xielu[0] = layer.xielu[1] = 0.8f, layer.xielu[2] = 0.5f;
        if (l == 1) {
            mix(decoder, layer, 8, 3);
            layer.router.scores = PIPPIN_SIGMOID, layer.router.groups = 4, layer.router.active_groups = 2;
            layer.router.best_two = 1, layer.router.bias = decoder.vector(8), layer.router.choice_bias = decoder.vector(8);
            layer.limit = 1.f;
            layer.shared = {decoder.matrix(PIPPIN_INT4, SIZE, WIDTH), decoder.matrix(PIPPIN_INT4, SIZE, WIDTH),
                            decoder.matrix(PIPPIN_INT4, WIDTH, SIZE), decoder.vector(SIZE), decoder.vector(SIZE),
                            decoder.vector(WIDTH)};
            layer.shared_gate = decoder.vector(WIDTH);
        } else {
            feed(decoder, layer, PIPPIN_INT4, l == 0);
            layer.up_bias = decoder.vector(SIZE), layer.down_bias = decoder.vector(WIDTH);
        }
    }
    open(decoder, layers);
}

/* Every recurrence, the second beside attention; the last layer is a feed-forward layer alone. */
void describe_recurrent(Decoder &decoder) {
    pippin_config &config = decoder.config;
    config.heads = HEADS, config.kv_heads = KV_HEADS, config.head_dim = HEAD_DIM;
    config.residual_scale = config.logit_scale = 1.f;
    std::vector<pippin_layer> layers(6);
    for (int l = 0; l < 5; ++l) {
        const int kind = l < 4 ? l + 1 : PIPPIN_DELTA_RULE;
        decoder.recurrent.push_back(std::make_unique<pippin_recurrent>());
        pippin_recurrent &r = *decoder.recurrent.back();
        r.kind = kind, r.taps = 2 + l, r.heads = 4, r.groups = kind < PIPPIN_GATED_UNIT && kind > 1 ? 2 : 1;
        r.key_dim = kind == PIPPIN_DELTA_RULE || kind == PIPPIN_STATE_SPACE ? 20 : 0, r.value_dim = l == 1 ? 72 : 12;
        r.eps = 1e-5f, r.beta = 1.f, r.max_step = 10.f, r.activation = PIPPIN_GELU_TANH;
        const int gates[5] = {PIPPIN_GATE_PLAIN, PIPPIN_GATE_SILU_AFTER, PIPPIN_GATE_SILU_BEFORE, PIPPIN_GATE_ACTIVATED,
                              PIPPIN_GATE_SIGMOID_AFTER};
        r.gate = gates[l];
        const int64_t values = r.heads * r.value_dim, keys = r.groups * r.key_dim, rank = 16;
        r.decays = l == 4 ? r.heads * r.key_dim : r.heads;
        const auto in = [&](int i, int64_t rows, int64_t columns = WIDTH) {
            r.in[i] = decoder.matrix(PIPPIN_F32, rows, columns), r.in_bias[i] = decoder.vector(rows);
        };
        int64_t channels = values, memory = 0;
        if (kind == PIPPIN_CONVOLUTION) in(0, 3 * values);
        if (kind == PIPPIN_DELTA_RULE) {
            in(0, keys), in(1, keys), in(2, values), in(3, r.heads);
            in(4, l == 4 ? rank : r.decays), in(5, l == 4 ? rank : values);
            if (l == 4) in(6, r.decays, rank), in(7, values, rank);
            channels = 2 * keys + values, memory = values * r.key_dim;
        }
        if (kind == PIPPIN_STATE_SPACE) {
            in(0, 2 * values + 2 * keys + r.heads);
            channels = 2 * keys + values, memory = values * r.key_dim;
        }
        if (kind == PIPPIN_GATED_UNIT) {
            in(0, values), in(1, values);
            memory = values + 1;
            for (int g = 0; g < 2; ++g)
                r.open[g] = decoder.vector(r.heads * r.value_dim * r.value_dim), r.open_bias[g] = decoder.vector(values);
        }
        r.out = decoder.matrix(PIPPIN_F32, WIDTH, values), r.out_bias = decoder.vector(WIDTH);
        r.conv = decoder.vector(r.taps * channels), r.conv_bias = decoder.vector(channels);
        r.rate = decoder.vector(values, -1.f), r.step_bias = decoder.vector(r.decays), r.skip = decoder.vector(r.heads);
        if (kind == PIPPIN_DELTA_RULE || kind == PIPPIN_STATE_SPACE)
            r.norm_size = r.value_dim, r.norm = decoder.vector(values, 1.f);
        decoder.state_sizes.push_back((r.taps - 1) * channels + memory);
        pippin_layer &layer = layers[size_t(l)] = pippin_layer{};
        layer.source = layer.rope = -1;
        if (l == 1) attend(decoder, layer, PIPPIN_F32), layer.rope = 0;
        layer.attention_norm = decoder.vector(WIDTH, 1.f);
        layer.recurrent = &r;
    }
    layers[5] = pippin_layer{};
    layers[5].source = layers[5].rope = -1;
    layers[5].feedforward_norm = decoder.vector(WIDTH, 1.f);
    feed(decoder, layers[5], PIPPIN_INT4, true);
    open(decoder, layers);
}

void describe_latent(Decoder &decoder) {
    constexpr int32_t rank = 40, rotated = 8, plain = 20, values = 12, low = 24;
    pippin_config &config = decoder.config;
    config.heads = HEADS, config.kv_heads = 1, config.head_dim = rank + rotated, decoder.rotary_dim = rotated;
    config.residual_scale = config.logit_scale = 1.f;
    for (int64_t head = 0; head < HEADS; ++head) decoder.heads.push_back(decoder.matrix(PIPPIN_BF16, rank, plain));
    for (int64_t head = 0; head < HEADS; ++head) decoder.heads.push_back(decoder.matrix(PIPPIN_BF16, values, rank));
    decoder.latent = std::make_unique<pippin_latent>();
    *decoder.latent = {rank, rotated, plain, values, decoder.matrix(PIPPIN_INT4, low, WIDTH), decoder.vector(low),
                       decoder.vector(low, 1.f), decoder.vector(rank, 1.f), decoder.heads.data(),
                       decoder.heads.data() + HEADS, 1e-6f, 0};
    pippin_layer layer{};
    layer.source = -1, layer.latent = decoder.latent.get();
    layer.q = decoder.matrix(PIPPIN_F32, HEADS * (plain + rotated), low);
    layer.k = decoder.matrix(PIPPIN_INT4, rank + rotated, WIDTH);
    layer.output = decoder.matrix(PIPPIN_F32, WIDTH, HEADS * values);
    layer.attention_norm = decoder.vector(WIDTH, 1.f), layer.feedforward_norm = decoder.vector(WIDTH, 1.f);
    feed(decoder, layer, PIPPIN_INT4, true);
    open(decoder, {layer, layer});
}

/* Two sequences of `length` tokens, in pieces of at most `piece`; the logits of all tokens. rich: with all that a pass may
 * have and that does not depend on how it is cut. */
std::vector<float> decode(const Decoder &decoder, int cache, int32_t length, int32_t piece, bool rich = false) {
    const int32_t blocks = (length + 15) / 16;
    const int64_t size = pippin_block_bytes(decoder.model, cache), layers = decoder.config.layers;
    const int32_t all_blocks = 2 * blocks * decoder.groups;
    const Bytes pool = bytes_of(all_blocks * size);
    memset(pool.get(), 0xff, size_t(all_blocks * size));
    std::vector<int32_t> table, table_starts{0};
    for (int32_t group = 0; group < decoder.groups; ++group)
        for (int32_t s = 0; s < 2; ++s) {
            for (int32_t block = 0; block < blocks; ++block) table.push_back(2 * (group * blocks + block) + s);
            table_starts.push_back(int32_t(table.size()));
        }
    std::vector<float> all(size_t(2 * length * VOCAB));
    const auto down = vector_of(4 * WIDTH), up = vector_of(HEADS * HEAD_DIM * 4);
    std::vector<pippin_change> changes(size_t(PIPPIN_CHANGES * layers), pippin_change{});
    if (!decoder.latent && decoder.recurrent.empty()) changes[0] = {down.data(), up.data(), 4, WIDTH, HEADS * HEAD_DIM};
    const auto scale = vector_of(WIDTH, 1.f), shift = vector_of(WIDTH), given_row = vector_of(WIDTH);
    std::vector<const float *> scales(size_t(PIPPIN_SITES * layers + 1), scale.data()), shifts(scales.size(), shift.data());
    std::vector<float> weights(size_t(layers * 8), 0.5f);
    for (int64_t l = 0; l < layers; ++l) weights[size_t(8 * l)] = 0;
    const float *const masks[2] = {weights.data(), nullptr};
    std::vector<std::vector<float>> states;
    std::vector<const float *> before;
    for (size_t i = 0; i < 2 * decoder.state_sizes.size(); ++i) before.push_back(nullptr);
    for (int32_t done = 0; done < length; done += piece) {
        const int32_t some = length - done < piece ? length - done : piece;
        std::vector<int32_t> ids, rows, positions, visible, starts{0, some, 2 * some}, held{done, done};
        std::vector<pippin_given> given;
        for (int32_t s = 0; s < 2; ++s)
            for (int32_t t = 0; t < some; ++t) {
                ids.push_back((17 * (done + t) + 5 * s) % int32_t(VOCAB));
                rows.push_back(s * some + t);
                positions.push_back((done + t) / 2);
                visible.push_back(done + t);
                if ((done + t) % 50 == 7) given.push_back({given_row.data(), s * some + t, 1});
            }
        const size_t tokens = positions.size();
        for (size_t i = 0; i < tokens; ++i) positions.push_back(positions[i] / 3);
        std::vector<float> logits(size_t(2 * some * VOCAB)), hidden(size_t(2 * some * WIDTH)), final_in(hidden.size());
        std::vector<float> received(size_t(layers * decoder.config.kv_heads * (done + some)));
        const pippin_observed observed{received.data(), done + some, 1, 0, 0, 0};
        const pippin_steering steering{scales.data(), shifts.data(), some, 2 * some};
        const pippin_share share{changes.data(), some, 2 * some};
        pippin_batch batch{};
        batch.tokens = 2 * some, batch.ids = ids.data(), batch.sequences = 2, batch.starts = starts.data();
        batch.held = held.data(), batch.tables = table.data(), batch.table_starts = table_starts.data();
        batch.outputs = 2 * some, batch.rows = rows.data(), batch.logits = logits.data();
        batch.to = int32_t(layers), batch.shares = 1, batch.share = &share;
        if (rich) {
            batch.hidden = hidden.data(), batch.before_norm = final_in.data();
            if (decoder.axes) batch.axes = 2, batch.positions = positions.data();
            batch.visible = visible.data(), batch.givens = int64_t(given.size()), batch.given = given.data();
            batch.steerings = 1, batch.steering = &steering, batch.experts = masks, batch.expert_columns = 8;
            batch.observations = 1, batch.observed = &observed;
        }
        std::vector<float *> after;
        std::vector<std::vector<float>> next;
        for (size_t i = 0; i < before.size(); ++i) next.emplace_back(size_t(decoder.state_sizes[i / 2]));
        for (auto &state : next) after.push_back(state.data());
        batch.states = before.data(), batch.new_states = after.data();
        require(pippin_forward(decoder.model, pool.get(), all_blocks, cache, &batch) == 0, "forward");
        states.swap(next);
        before.assign(after.begin(), after.end());
        for (int32_t s = 0; s < 2; ++s)
            memcpy(all.data() + (s * length + done) * VOCAB, logits.data() + s * some * VOCAB,
                   size_t(some * VOCAB) * sizeof(float));
    }
    for (float value : all) require(std::isfinite(value), "logits are numbers");
    return all;
}

void check_decoder(void (*describe)(Decoder &), int32_t length, bool rich) {
    Decoder decoder;
    describe(decoder);
    for (int cache = PIPPIN_CACHE_F32; cache <= PIPPIN_CACHE_INT8; ++cache) {
        seed = 99;
        pippin_set_threads(1, 0);
        const auto expected = decode(decoder, cache, length, length, rich);
        pippin_set_threads(3, cache == 1);
        for (int32_t piece : {length, 77}) {
            seed = 99;
            require(decode(decoder, cache, length, piece, rich) == expected,
                    "the same bits in pieces of " + std::to_string(piece));
        }
    }
}

/* Callers that share the pool, while the number of threads changes under them. */
void check_callers() {
    Decoder decoder;
    describe_plain(decoder);
    pippin_set_threads(3, 1);
    seed = 5;
    const auto expected = decode(decoder, PIPPIN_CACHE_BF16, 40, 9);
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 3; ++caller)
        callers.emplace_back([&] {
            const Weight weight{bytes_of(pippin_packed_bytes(PIPPIN_F32, 0, 40, 30)), {}};
            std::vector<float> values(1200, 0.5f), x(30, 1.f), y(40);
            pippin_matrix matrix{PIPPIN_F32, 0, 40, 30, 0.f, 0, weight.data.get()};
            for (int turn = 0; turn < 20; ++turn) {
                pippin_pack_dense(PIPPIN_F32, values.data(), 30, 40, 30, weight.data.get());
                require(pippin_matmul(&matrix, x.data(), 30, 1, nullptr, y.data(), 40) == 0 && y[39] == 15.f, "product");
                double seconds[4];
                pippin_profile(seconds);
            }
        });
    std::thread changer([] {
        for (int turn = 0; turn < 20; ++turn) pippin_set_threads(1 + turn % 4, turn % 2);
    });
    for (int turn = 0; turn < 5; ++turn) {
        seed = 5;
        require(decode(decoder, PIPPIN_CACHE_BF16, 40, 9) == expected, "the same bits in company");
    }
    for (std::thread &caller : callers) caller.join();
    changer.join();
}

/* A block read in one pass, in windows that go back, and token by token, on one thread and on three. */
void check_flow() {
    constexpr int64_t width = 48, inner = 3, hidden = 100, samples = 3, tokens = 22, capacity = 32;
    std::vector<Weight> weights;
    std::vector<std::vector<float>> vectors;
    const auto matrix = [&](int64_t rows, int64_t columns) {
        weights.push_back(weight_of(PIPPIN_F32, rows, columns));
        return weights.back().matrix;
    };
    const auto vector = [&](int64_t size, float around = 0.f) {
        vectors.push_back(vector_of(size, around));
        return vectors.back().data();
    };
    std::vector<pippin_flow_layer> layers;
    for (int i = 0; i < 2; ++i)
        layers.push_back({matrix(3 * width, width), matrix(width, width), matrix(hidden, width), matrix(width, hidden),
                          vector(3 * width), vector(width), vector(hidden), vector(width), vector(width, 1.f),
                          vector(width), vector(width, 1.f), vector(width)});
    const pippin_flow flow = {2, width, 3, inner, hidden, 1e-5f, 0, matrix(width, inner), matrix(2 * inner, width),
                              vector(width), vector(2 * inner), layers.data()};
    // small, so that nothing overflows: packed float32 weights are plain numbers
    float *out = reinterpret_cast<float *>(weights.back().data.get());
    for (int64_t i = 0; i < pippin_packed_bytes(PIPPIN_F32, 0, 2 * inner, width) / 4; ++i) out[i] *= 0.03f;
    for (int64_t branches : {1, 2}) {
        const int64_t rows = branches * samples;
        std::vector<float> cache(size_t(2 * rows * 2 * width * capacity), 0.f);
        const pippin_flow_batch batch = {samples, branches, tokens, capacity, vector(rows * (tokens - 1) * width),
                                         branches == 2 ? vector(rows, 1.f) : nullptr, cache.data()};
        const std::vector<float> z = vector_of(samples * tokens * inner), by = vector_of(tokens);
        std::vector<float> right;
        for (int threads : {1, 3}) {
            require(pippin_set_threads(threads, 0) == 0, "threads");
            std::vector<float> x(z);
            require(pippin_flow_invert(&flow, &batch, x.data(), z.data(), by.data(), 1, tokens) == 0, "invert");
            require(right.empty() || x == right, "the same on three threads");
            right = x;
            std::vector<float> whole(size_t(rows * (tokens - 1) * 2 * inner));
            require(pippin_flow_read(&flow, &batch, x.data(), 0, tokens - 1, whole.data()) == 0, "read");
            for (int64_t first : {20, 13, 0, 5}) {
                const int64_t count = first == 20 ? 1 : 7;
                std::vector<float> told(size_t(rows * count * 2 * inner));
                require(pippin_flow_read(&flow, &batch, x.data(), first, count, told.data()) == 0, "read again");
                for (int64_t row = 0; row < rows; ++row)
                    for (int64_t i = 0; i < count * 2 * inner; ++i)
                        require(std::fabs(told[size_t(row * count * 2 * inner + i)] -
                                          whole[size_t((row * (tokens - 1) + first) * 2 * inner + i)]) < 1e-3f,
                                "a window tells what the whole does");
            }
        }
        require(pippin_flow_read(&flow, &batch, z.data(), 20, 2, right.data()) == PIPPIN_BAD_ARGUMENT, "too many");
        require(pippin_flow_invert(&flow, &batch, right.data(), z.data(), by.data(), 0, 3) == PIPPIN_BAD_ARGUMENT, "0");
    }
}

} // namespace

int main(int count, char **names) {
    const std::string sets = count > 1 ? names[1] : pippin_instruction_sets();
    for (size_t at = 0; at <= sets.size();) {
        const size_t end = std::min(sets.find(',', at), sets.size());
        const std::string name = sets.substr(at, end - at);
        require(pippin_use_instruction_set(name.c_str()) == 0, name);
        for (int format : {PIPPIN_Q4_0, PIPPIN_Q4_1, PIPPIN_Q5_0, PIPPIN_Q5_1, PIPPIN_Q8_0}) check_product(format, 37, 96, 0);
        for (int format : {PIPPIN_Q4_K, PIPPIN_Q5_K, PIPPIN_Q6_K}) check_product(format, 19, 512, 0);
        for (int format : {PIPPIN_INT2, PIPPIN_INT3, PIPPIN_INT4, PIPPIN_INT8, PIPPIN_AFFINE2, PIPPIN_AFFINE3,
                           PIPPIN_AFFINE4, PIPPIN_AFFINE5, PIPPIN_AFFINE6, PIPPIN_AFFINE8})
            for (int group : {32, 64, 128}) check_product(format, 50, 256, group);
        for (int format : {PIPPIN_F32, PIPPIN_BF16}) check_product(format, 33, 45, 0);
        check_decoder(describe_plain, 600, false);
        check_decoder(describe_plain, 300, true);
        for (auto *describe : {describe_rich, describe_recurrent, describe_latent})
            for (bool rich : {false, true}) check_decoder(describe, 200, rich);
        check_callers();
        check_flow();
        std::printf("%s: ok\n", name.c_str());
        at = end + 1;
    }
    require(pippin_read_bandwidth(1 << 20, 2, 2) > 0, "bandwidth");
    return 0;
}
