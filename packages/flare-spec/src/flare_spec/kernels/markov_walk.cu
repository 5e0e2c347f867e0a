// Samples the slots of a block one after the other, one thread block for each sequence: biases of the candidates from
// the Markov embedding of the token before, scores, temperature, noise, and the best with the lowest id.
//
// The rounding is the eager reference's: bias = bf16(fp32 dot product), score = bf16(fp32 sum), then fp32. Only the
// order in which a dot product is summed differs.
//
// Compiled with WIDE (1: weights are fp32, 0: bf16).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / 32;
constexpr int PIECE = 8;        // elements that a lane takes of a row at once
constexpr int MOST_PIECES = 2;  // a lane's, of a row of up to 512 elements
constexpr u32 NOTHING = 0xFF800000;

__device__ __forceinline__ float from_bf16(u32 bits) { return __uint_as_float(bits << 16); }

__device__ __forceinline__ u32 to_bf16(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// Elements [at, at + 8) of a row of weights.
__device__ __forceinline__ void load_piece(const void* weights, u64 at, float* values) {
#if WIDE
    const float4* source = (const float4*)((const float*)weights + at);
    float4 low = source[0], high = source[1];
    values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
    values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
#else
    uint4 words = *(const uint4*)((const u16*)weights + at);
    u32 pairs[4] = {words.x, words.y, words.z, words.w};
    #pragma unroll
    for (int pair = 0; pair < 4; pair++) {
        values[2 * pair] = __uint_as_float(pairs[pair] << 16);
        values[2 * pair + 1] = __uint_as_float(pairs[pair] & 0xFFFF0000u);
    }
#endif
}

// Philox4x32-10: the word of `id`'s lane, of counter (id >> 2, position, stream) and key seed; Gumbel noise from it.
__device__ float gumbel(u64 seed, u64 position, i64 id, u32 stream) {
    u32 word0 = (u32)(id >> 2), word1 = (u32)position, word2 = (u32)(position >> 32), word3 = stream;
    u32 key0 = (u32)seed, key1 = (u32)(seed >> 32);
    #pragma unroll
    for (int round = 0; round < 10; round++) {
        u32 high0 = __umulhi(word0, 0xD2511F53u), low0 = word0 * 0xD2511F53u;
        u32 high1 = __umulhi(word2, 0xCD9E8D57u), low1 = word2 * 0xCD9E8D57u;
        word0 = high1 ^ word1 ^ key0;
        word1 = low1;
        word2 = high0 ^ word3 ^ key1;
        word3 = low0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    int lane = (int)(id & 3);
    u32 bits = lane < 2 ? (lane == 0 ? word0 : word1) : (lane == 2 ? word2 : word3);
    float uniform = (float)(((double)bits + 0.5) * 0x1p-32);
    return -logf(-log1pf(-uniform));
}

// base, scores: bf16 [B, gamma, N]; ids: int64 [B, gamma, N]; w1, w2: [vocabulary, rank], rank a multiple of 8 and at
// most 512; features: [B, gamma, rank] in the dtype of w1; tokens: int64 [B, gamma]. Shared memory: gamma * N floats.
extern "C" __global__ void __launch_bounds__(THREADS) markov_walk(
    const u16* __restrict__ base, const i64* __restrict__ ids, const void* __restrict__ w1, const void* __restrict__ w2,
    const i64* __restrict__ anchors, const float* __restrict__ temperatures, const i64* __restrict__ seeds,
    const i64* __restrict__ positions, i64* __restrict__ tokens, u16* __restrict__ scores, u8* __restrict__ features,
    int gamma, int columns, int rank, int stream) {
    extern __shared__ float noise[];
    __shared__ float best_values[2][WARPS];
    __shared__ i64 best_ids[2][WARPS];
    constexpr int WIDTH = WIDE ? 4 : 2;
    u64 sequence = blockIdx.x;
    u64 start = sequence * gamma * columns;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float temperature = temperatures[sequence];
    bool is_sampled = temperature > 0.0f;
    float divisor = is_sampled ? temperature : 1.0f;
    i64 previous = anchors[sequence];

    // All rows that the walk can need are known: they leave memory at once, and the slots find them in the L2 cache.
    int row_bytes = rank * WIDTH, lines = (row_bytes + 127) / 128;
    for (int index = threadIdx.x; index < gamma * columns * lines; index += THREADS) {
        const u8* row = (const u8*)w2 + (u64)ids[start + index / lines] * row_bytes;
        asm volatile("prefetch.global.L2 [%0];" ::"l"(row + index % lines * 128));
    }
    for (int index = threadIdx.x; index < gamma * columns; index += THREADS) {
        u64 position = (u64)positions[sequence] + index / columns;
        noise[index] = is_sampled ? gumbel(seeds[sequence], position, ids[start + index], stream) : 0.0f;
    }
    __syncthreads();

    // Of a row each lane takes pieces; where a row has fewer than 32, several rows share a warp.
    int row_lanes = 32;
    while (row_lanes > 1 && (row_lanes >> 1) * PIECE >= rank) row_lanes >>= 1;
    int warp_rows = 32 / row_lanes, own_row = lane / row_lanes, own_piece = lane % row_lanes;
    for (int slot = 0; slot < gamma; slot++) {
        float embedding[MOST_PIECES][PIECE];
        #pragma unroll
        for (int part = 0; part < MOST_PIECES; part++) {
            int at = (own_piece + part * 32) * PIECE;
            bool is_real = at < rank && (part == 0 || row_lanes == 32);
            if (is_real) load_piece(w1, (u64)previous * rank + at, embedding[part]);
            #pragma unroll
            for (int item = 0; item < PIECE; item++) embedding[part][item] = is_real ? embedding[part][item] : 0.0f;
        }
        const u8* row = (const u8*)w1 + (u64)previous * row_bytes;
        u8* feature = features + (sequence * gamma + slot) * row_bytes;
        for (int byte = threadIdx.x * 4; byte < row_bytes; byte += THREADS * 4)
            *(u32*)(feature + byte) = *(const u32*)(row + byte);

        float best = __uint_as_float(NOTHING);
        i64 best_id = 0x7FFFFFFFFFFFFFFF;
        u64 slot_start = start + (u64)slot * columns;
        #pragma unroll 4
        for (int first = warp * warp_rows; first < columns; first += WARPS * warp_rows) {
            int column = first + own_row;
            bool is_real = column < columns;
            i64 id = is_real ? ids[slot_start + column] : 0;
            u32 logit = is_real ? base[slot_start + column] : 0;
            float sum = 0.0f;
            #pragma unroll
            for (int part = 0; part < MOST_PIECES; part++) {
                int at = (own_piece + part * 32) * PIECE;
                if (is_real && at < rank && (part == 0 || row_lanes == 32)) {
                    float values[PIECE];
                    load_piece(w2, (u64)id * rank + at, values);
                    #pragma unroll
                    for (int item = 0; item < PIECE; item++) sum = fmaf(values[item], embedding[part][item], sum);
                }
            }
            for (int distance = row_lanes >> 1; distance > 0; distance >>= 1)
                sum += __shfl_xor_sync(0xFFFFFFFF, sum, distance);
            u32 score = to_bf16(from_bf16(logit) + from_bf16(to_bf16(sum)));
            if ((score & 0x7FFF) > 0x7F80) score = NOTHING >> 16;
            float noisy = from_bf16(score) / divisor + (is_real ? noise[slot * columns + column] : 0.0f);
            if (is_real && own_piece == 0) scores[slot_start + column] = (u16)score;
            if (is_real && (noisy > best || (noisy == best && id < best_id))) best = noisy, best_id = id;
        }
        #pragma unroll
        for (int distance = 16; distance > 0; distance >>= 1) {
            float other = __shfl_xor_sync(0xFFFFFFFF, best, distance);
            i64 other_id = __shfl_xor_sync(0xFFFFFFFF, best_id, distance);
            if (other > best || (other == best && other_id < best_id)) best = other, best_id = other_id;
        }
        // Two places in turn: one barrier a slot keeps them from being overwritten while they are read.
        int turn = slot & 1;
        if (lane == 0) best_values[turn][warp] = best, best_ids[turn][warp] = best_id;
        __syncthreads();
        previous = best_ids[turn][0];
        best = best_values[turn][0];
        #pragma unroll
        for (int other = 1; other < WARPS; other++) {
            float value = best_values[turn][other];
            i64 id = best_ids[turn][other];
            if (value > best || (value == best && id < previous)) best = value, previous = id;
        }
        if (threadIdx.x == 0) tokens[sequence * gamma + slot] = previous;
    }
}
