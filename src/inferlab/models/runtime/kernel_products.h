// Products of inputs with weights as they are stored: fp32, bf16, INT8 a channel, INT4 in groups. Part
// of kernel.cpp.

#pragma once

#include <algorithm>

#include "kernel_vectors.h"

namespace {

constexpr int ROWS = 4;        // weight rows that share a load of the inputs
constexpr int MAX_TOKENS = 4;  // tokens that share the widening of a weight

struct Matrix {  // [rows, in]
    Kind kind;
    int32_t rows;
    int32_t group;        // INT4: columns that share a scale and a zero point
    const void* weights;  // INT4: a group's first half in the low bits, its second in the high
    const void* scale;    // INT8: fp32 [rows]; INT4: fp16 [rows, groups]
    const uint8_t* zero;  // INT4: [rows, groups]
    const float* bias;    // [rows] or null
};

struct Projection {  // matrices of one input, their outputs one after another
    int32_t in, rows, count;
    Matrix parts[3];
};

constexpr size_t bytes_of(Kind kind) { return kind == FP32 ? 4 : kind == BF16 ? 2 : 1; }

// sums[t][r] += row r of INT4 weights times input t.
template <int rows, int tokens>
void add_int4(const Matrix& matrix, int in, int first, const float* inputs,
              Floats (&sums)[tokens][rows]) {
    const int groups = in / matrix.group, half = matrix.group / 2;
    const uint8_t* block = static_cast<const uint8_t*>(matrix.weights) + size_t(first) * in / 2;
    for (int g = 0; g < groups; g++) {
        prefetch(block + size_t(g) * rows * half, size_t(rows) * half);
        Floats values[rows];  // what each of the sixteen codes stands for in this group
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const size_t at = size_t(first + r) * groups + g;
            const float scale = static_cast<const _Float16*>(matrix.scale)[at];
            values[r] = (CODES - float(matrix.zero[at])) * scale;
        }
        for (int i = 0; i < half; i += LANES) {
            const float* input = inputs + g * matrix.group + i;
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                const Ints codes = widened(block + size_t(r) * (in / 2) + g * half + i);
                const Floats low = looked_up(values[r], codes);
                const Floats high = looked_up(values[r], codes >> 4);
#pragma GCC unroll 4
                for (int t = 0; t < tokens; t++) {
                    sums[t][r] += low * load<Floats>(input + size_t(t) * in);
                    sums[t][r] += high * load<Floats>(input + size_t(t) * in + half);
                }
            }
        }
    }
}

// outputs[t][r] = row `first + r` of the matrix times input t.
template <Kind kind, int rows, int tokens>
void multiply_block(const Matrix& matrix, int in, int first, const float* inputs, float* outputs,
                    size_t stride) {
    Floats sums[tokens][rows] = {};
    if constexpr (kind == INT4) {
        add_int4(matrix, in, first, inputs, sums);
    } else {
        constexpr size_t step = rows * bytes_of(kind);
        const char* block = static_cast<const char*>(matrix.weights) +
                            size_t(first) * in * bytes_of(kind);
        for (int i = 0; i < in; i += LANES) {
            prefetch(block + i * step, LANES * step);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                const Floats weights = widen<kind>(matrix.weights, size_t(first + r) * in + i);
#pragma GCC unroll 4
                for (int t = 0; t < tokens; t++)
                    sums[t][r] += weights * load<Floats>(inputs + size_t(t) * in + i);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        const float scale =
            kind == INT8 ? static_cast<const float*>(matrix.scale)[first + r] : 1.0f;
        const float bias = matrix.bias ? matrix.bias[first + r] : 0.0f;
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++) outputs[t * stride + r] = sum(sums[t][r]) * scale + bias;
    }
}

template <Kind kind, int tokens>
void multiply_rows(const Matrix& matrix, int in, int begin, int end, const float* inputs,
                   float* outputs, size_t stride) {
    int row = begin;
    for (; row + ROWS <= end; row += ROWS)
        multiply_block<kind, ROWS, tokens>(matrix, in, row, inputs, outputs + row - begin, stride);
    for (; row < end; row++)
        multiply_block<kind, 1, tokens>(matrix, in, row, inputs, outputs + row - begin, stride);
}

template <Kind kind>
void multiply_matrix(const Matrix& matrix, int in, int begin, int end, const float* inputs,
                     int tokens, float* outputs, size_t stride) {
    constexpr decltype(&multiply_rows<kind, 1>) widths[] = {
        multiply_rows<kind, 1>, multiply_rows<kind, 2>, multiply_rows<kind, 3>,
        multiply_rows<kind, MAX_TOKENS>};
    // All tokens of a few rows before the next rows: those are then read from memory once.
    for (int row = begin; row < end; row += ROWS)
        for (int t = 0; t < tokens; t += MAX_TOKENS)
            widths[std::min(tokens - t, MAX_TOKENS) - 1](
                matrix, in, row, std::min(row + ROWS, end), inputs + size_t(t) * in,
                outputs + t * stride + row - begin, stride);
}

// Outputs `begin` to `end` of a projection for each of `inputs` [tokens, in].
void multiply(const Projection& projection, int begin, int end, const float* inputs, int tokens,
              float* outputs, size_t stride) {
    constexpr decltype(&multiply_matrix<FP32>) kinds[] = {
        multiply_matrix<FP32>, multiply_matrix<BF16>, multiply_matrix<INT8>, multiply_matrix<INT4>};
    int offset = 0;
    for (int p = 0; p < projection.count; p++) {
        const Matrix& matrix = projection.parts[p];
        const int from = std::max(begin, offset), to = std::min(end, offset + matrix.rows);
        if (from < to)
            kinds[matrix.kind](matrix, projection.in, from - offset, to - offset, inputs, tokens,
                               outputs + from - begin, stride);
        offset += matrix.rows;
    }
}

}  // namespace
