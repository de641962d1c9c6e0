// Sixteen numbers at a time: loads that widen to fp32, and the few operations that compilers take
// apart lane by lane when they are left to themselves. Part of kernel.cpp.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;    // values in a vector; sizes of the model are multiples of it
constexpr int AHEAD = 4096;  // bytes: processors do not see by themselves where four rows lead
constexpr int LINE = 64;     // bytes of a cache line
using Floats = float __attribute__((vector_size(4 * LANES)));
using Ints = int32_t __attribute__((vector_size(4 * LANES)));

constexpr Floats CODES = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

enum Kind : int32_t { FP32, BF16, INT8, INT4 };

template <class Vector>
Vector load(const void* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
}

#ifdef __AVX512F__
Ints widened(const uint8_t* from) { return (Ints)_mm512_cvtepu8_epi32(load<__m128i>(from)); }
Ints widened(const int8_t* from) { return (Ints)_mm512_cvtepi8_epi32(load<__m128i>(from)); }
Ints widened(const uint16_t* from) { return (Ints)_mm512_cvtepu16_epi32(load<__m256i>(from)); }
Floats looked_up(Floats table, Ints indices) {  // by the low four bits of each index
    return (Floats)_mm512_permutexvar_ps((__m512i)indices, (__m512)table);
}
#elif defined(__AVX2__)
Ints joined(__m256i low, __m256i high) {
    Ints both;
    std::memcpy(&both, &low, sizeof low);
    std::memcpy(reinterpret_cast<char*>(&both) + sizeof low, &high, sizeof high);
    return both;
}
Ints widened(const uint8_t* from) {
    return joined(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)),
                  _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(from + 8))));
}
Ints widened(const int8_t* from) {
    return joined(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)),
                  _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(from + 8))));
}
Ints widened(const uint16_t* from) {
    return joined(_mm256_cvtepu16_epi32(load<__m128i>(from)),
                  _mm256_cvtepu16_epi32(load<__m128i>(from + 8)));
}
__m256i looked_up(__m256 low, __m256 high, __m256i indices) {  // bit 3 says in which half
    const __m256 in_low = _mm256_permutevar8x32_ps(low, indices);
    const __m256 in_high = _mm256_permutevar8x32_ps(high, indices);
    const __m256 half = _mm256_castsi256_ps(_mm256_slli_epi32(indices, 28));
    return _mm256_castps_si256(_mm256_blendv_ps(in_low, in_high, half));
}
Floats looked_up(Floats table, Ints indices) {  // by the low four bits of each index
    __m256 entries[2];
    __m256i halves[2];
    std::memcpy(entries, &table, sizeof entries);
    std::memcpy(halves, &indices, sizeof halves);
    return (Floats)joined(looked_up(entries[0], entries[1], halves[0]),
                          looked_up(entries[0], entries[1], halves[1]));
}
#else
template <class Integer>
Ints widened(const Integer* from) {
    Ints lanes;
    for (int i = 0; i < LANES; i++) lanes[i] = from[i];
    return lanes;
}
Floats looked_up(Floats table, Ints indices) {
    Floats found;
    for (int i = 0; i < LANES; i++) found[i] = table[indices[i] & 15];
    return found;
}
#endif

#ifdef __AVX512F__
float sum(Floats vector) { return _mm512_reduce_add_ps((__m512)vector); }
#else
float sum(Floats vector) {  // halves onto each other, as above
    float lanes[LANES];
    std::memcpy(lanes, &vector, sizeof lanes);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}
#endif

// LANES values from `offset` on, as fp32.
template <Kind kind>
Floats widen(const void* from, size_t offset) {
    if constexpr (kind == FP32) return load<Floats>(static_cast<const float*>(from) + offset);
    if constexpr (kind == BF16)
        return (Floats)(widened(static_cast<const uint16_t*>(from) + offset) << 16);
    return __builtin_convertvector(widened(static_cast<const int8_t*>(from) + offset), Floats);
}

// Ask for the `size` bytes that lie AHEAD of `from`.
inline void prefetch(const void* from, size_t size) {
    for (size_t i = 0; i < size; i += LINE)
        __builtin_prefetch(static_cast<const char*>(from) + AHEAD + i);
}

}  // namespace
