// One pass of a Llama-family model over few tokens, as one parallel region: at the size of these
// models the cost of a decoded token is reading the weights once, and every call beyond that.
//
// Weights are used as they are stored and widened in registers; activations and sums are fp32. The
// sums of one token do not depend on how many others are in the pass, so that verifying a draft
// gives bit by bit what decoding gives. Compiled and called by kernel.py, whose structures mirror
// those here.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernel_products.h"

namespace {

struct Layer {
    const float *attention_norm, *mlp_norm, *query_norm, *key_norm;
    Projection qkv, output, gate_up, down;
};

struct Model {
    int32_t hidden, intermediate, layers, heads, kv_heads, head_dim;
    float epsilon, magnitude;
    const float *frequencies, *norm;
    const Layer* layer;
};

struct Cache {  // keys, values: [layers, batch, kv_heads, slots, head_dim]
    Kind kind;
    int32_t batch, slots, used, anchors, recent;
    void *keys, *values;
    float *key_scales, *value_scales;  // INT8: [layers, batch, kv_heads, slots]
    const int64_t* positions;          // [batch, slots], negative where empty
};

// The share of `rows` that a thread takes, in whole blocks of rows.
struct Share {
    int begin, end;
    Share(int rows, int thread, int threads) {
        const int blocks = (rows + ROWS - 1) / ROWS;
        begin = std::min(rows, int(int64_t(blocks) * thread / threads) * ROWS);
        end = std::min(rows, int(int64_t(blocks) * (thread + 1) / threads) * ROWS);
    }
};

void normalise(const float* input, const float* weight, int size, float epsilon, float* output) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int i = 0; i < size; i++) squares += input[i] * input[i];
    const float factor = 1 / std::sqrt(squares / size + epsilon);
    for (int i = 0; i < size; i++) output[i] = input[i] * factor * weight[i];
}

// e^x to within 2e-7 of its value, from 2^n times a polynomial; plain arithmetic, so it vectorises.
inline float exponential(float x) {
    x = std::min(std::max(x, -87.0f), 88.0f) * 1.44269504f;
    const float whole = std::floor(x + 0.5f), part = (x - whole) * 0.693147181f;
    float power = 1.0f / 5040;
    for (const float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        power = power * part + term;
    const int32_t bits = (int32_t(whole) + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return power * scale;
}

void rotate(float* head, int head_dim, int64_t position, const Model& model) {
    const int half = head_dim / 2;
    for (int i = 0; i < half; i++) {
        const float angle = float(position) * model.frequencies[i];
        const float cosine = std::cos(angle) * model.magnitude;
        const float sine = std::sin(angle) * model.magnitude;
        const float first = head[i], second = head[i + half];
        head[i] = first * cosine - second * sine;
        head[i + half] = second * cosine + first * sine;
    }
}

// Store one head's vector at `row` of the cache, rounded to nearest even.
void store(Kind kind, const float* vector, int size, void* values, float* scales, size_t row) {
    const size_t at = row * size;
    if (kind == FP32) {
        std::memcpy(static_cast<float*>(values) + at, vector, sizeof(float) * size);
    } else if (kind == BF16) {
        for (int i = 0; i < size; i++) {
            uint32_t bits;
            std::memcpy(&bits, vector + i, sizeof bits);
            static_cast<uint16_t*>(values)[at + i] = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        }
    } else {
        float largest = 0;
        for (int i = 0; i < size; i++) largest = std::max(largest, std::fabs(vector[i]));
        const float scale = scales[row] = largest > 0 ? largest / 127 : 1;
        for (int i = 0; i < size; i++)
            static_cast<int8_t*>(values)[at + i] = int8_t(std::nearbyint(vector[i] / scale));
    }
}

// Softmax attention of one query over a row of the cache that begins at `base` (in slots).
template <Kind kind>
void attend(const Cache& cache, size_t base, const int64_t* positions, int64_t position,
            const float* query, int head_dim, float* scores, float* output) {
    float largest = -INFINITY;
    for (int slot = 0; slot < cache.used; slot++) {
        const int64_t key = positions[slot];
        const bool seen = key >= 0 && key <= position &&
                          (key < cache.anchors || key > position - cache.recent);
        scores[slot] = -INFINITY;
        if (!seen) continue;
        Floats products = {};
        for (int i = 0; i < head_dim; i += LANES)
            products += widen<kind>(cache.keys, (base + slot) * head_dim + i) *
                        load<Floats>(query + i);
        scores[slot] = sum(products) * (kind == INT8 ? cache.key_scales[base + slot] : 1.0f);
        largest = std::max(largest, scores[slot]);
    }
    float total = 0;
    const float scale = 1 / std::sqrt(float(head_dim));
    std::fill_n(output, head_dim, 0.0f);
    for (int slot = 0; slot < cache.used; slot++) {
        if (scores[slot] == -INFINITY) continue;
        float weight = exponential((scores[slot] - largest) * scale);
        total += weight;
        if (kind == INT8) weight *= cache.value_scales[base + slot];
        for (int i = 0; i < head_dim; i += LANES) {
            const Floats sums = load<Floats>(output + i) +
                                widen<kind>(cache.values, (base + slot) * head_dim + i) * weight;
            std::memcpy(output + i, &sums, sizeof sums);
        }
    }
    // Padding sees nothing and gets zeros.
    for (int i = 0; i < head_dim; i++) output[i] = total > 0 ? output[i] / total : 0;
}

}  // namespace

extern "C" void multiply_all(const Projection* projection, const float* inputs, int tokens,
                             float* outputs, int threads) {
#pragma omp parallel num_threads(threads)
    {
        const Share share(projection->rows, omp_get_thread_num(), omp_get_num_threads());
        multiply(*projection, share.begin, share.end, inputs, tokens, outputs + share.begin,
                 projection->rows);
    }
}

// `states` [tokens, hidden]: embeddings before, final normed states after. Token i belongs to the
// sequence i / (tokens / batch) and goes to `slots[i]`.
extern "C" void forward(const Model* shared_model, const Cache* shared_cache, float* states,
                        const int64_t* token_positions, const int64_t* token_slots, int tokens,
                        int threads) {
    const Model& model = *shared_model;
    const Cache& cache = *shared_cache;
    const int hidden = model.hidden, inner = model.intermediate, head_dim = model.head_dim;
    const int queries = model.heads * head_dim, heads = model.heads + 2 * model.kv_heads;
    const int columns = tokens / cache.batch;
    std::vector<float> qkv(size_t(tokens) * heads * head_dim), mixed(size_t(tokens) * queries);
    std::vector<float> gated(size_t(tokens) * inner);
    constexpr decltype(&attend<FP32>) attends[] = {attend<FP32>, attend<BF16>, attend<INT8>};
#pragma omp parallel num_threads(threads)
    {
        const int thread = omp_get_thread_num(), count = omp_get_num_threads();
        std::vector<float> normed(size_t(tokens) * hidden), scores(cache.used);
        const Share qkv_rows(heads * head_dim, thread, count), rows(hidden, thread, count);
        const Share inner_rows(inner, thread, count);
        const int width = inner_rows.end - inner_rows.begin;
        std::vector<float> gate(size_t(tokens) * width), up(gate.size());
        std::vector<float> change(size_t(tokens) * (rows.end - rows.begin));
        const auto normalise_all = [&](const float* weight) {
            for (int t = 0; t < tokens; t++)
                normalise(states + size_t(t) * hidden, weight, hidden, model.epsilon,
                          normed.data() + size_t(t) * hidden);
        };
        const auto add = [&](const Projection& projection, const float* inputs) {
            const int taken = rows.end - rows.begin;
            multiply(projection, rows.begin, rows.end, inputs, tokens, change.data(), taken);
            for (int t = 0; t < tokens; t++)
                for (int i = 0; i < taken; i++)
                    states[size_t(t) * hidden + rows.begin + i] += change[size_t(t) * taken + i];
        };
        for (int number = 0; number < model.layers; number++) {
            const Layer& layer = model.layer[number];
            normalise_all(layer.attention_norm);
            multiply(layer.qkv, qkv_rows.begin, qkv_rows.end, normed.data(), tokens,
                     qkv.data() + qkv_rows.begin, size_t(heads) * head_dim);
#pragma omp barrier
            const auto row_of = [&](int token, int kv_head) {
                const size_t sequence = size_t(number) * cache.batch + token / columns;
                return (sequence * model.kv_heads + kv_head) * cache.slots;
            };
#pragma omp for
            for (int task = 0; task < tokens * heads; task++) {
                const int token = task / heads, head = task % heads;
                float* vector = qkv.data() + size_t(task) * head_dim;
                const int kv_head = (head - model.heads) % model.kv_heads;
                const bool is_value = head >= model.heads + model.kv_heads;
                const float* norm = head < model.heads ? layer.query_norm : layer.key_norm;
                if (norm && !is_value) normalise(vector, norm, head_dim, model.epsilon, vector);
                if (!is_value) rotate(vector, head_dim, token_positions[token], model);
                if (head >= model.heads)
                    store(cache.kind, vector, head_dim, is_value ? cache.values : cache.keys,
                          is_value ? cache.value_scales : cache.key_scales,
                          row_of(token, kv_head) + token_slots[token]);
            }
#pragma omp for
            for (int task = 0; task < tokens * model.heads; task++) {
                const int token = task / model.heads, head = task % model.heads;
                attends[cache.kind](
                    cache, row_of(token, head / (model.heads / model.kv_heads)),
                    cache.positions + size_t(token / columns) * cache.slots, token_positions[token],
                    qkv.data() + (size_t(token) * heads + head) * head_dim, head_dim, scores.data(),
                    mixed.data() + size_t(task) * head_dim);
            }
            add(layer.output, mixed.data());
#pragma omp barrier
            normalise_all(layer.mlp_norm);
            multiply(layer.gate_up, inner_rows.begin, inner_rows.end, normed.data(), tokens,
                     gate.data(), width);
            multiply(layer.gate_up, inner + inner_rows.begin, inner + inner_rows.end, normed.data(),
                     tokens, up.data(), width);
            for (int t = 0; t < tokens; t++)
                for (int i = 0; i < width; i++) {
                    const float value = gate[size_t(t) * width + i];
                    gated[size_t(t) * inner + inner_rows.begin + i] =
                        value / (1 + exponential(-value)) * up[size_t(t) * width + i];
                }
#pragma omp barrier
            add(layer.down, gated.data());
#pragma omp barrier
        }
        // Every thread has the whole states; the first writes the normed ones back.
        normalise_all(model.norm);
#pragma omp barrier
#pragma omp master
        std::copy(normed.begin(), normed.end(), states);
    }
}
