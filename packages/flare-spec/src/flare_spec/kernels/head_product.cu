// Products of up to 64 rows with a quantised head on Hopper: out[m, n] = sum over k of rows[m, k] * weight[n, k].
//
// The weight goes from memory to registers by way of slots in shared memory that belong to one thread each, so that it
// needs no barrier; there it becomes 16-bit numbers, the left operand of wgmma. The rows come as an image that
// `prepare_rows` makes: what a product reads of them for one chunk of k lies in one piece, in the order in which the
// threads' registers hold the weight (any order of k gives the same sums), and arrives by one bulk copy.
//
// Compiled with FORMAT (0: FP8, 1: MXFP8, 2: NVFP4), TOKENS (8, 16 or 64: rows, filled up), WARPGROUPS, TILES (of 64
// weight rows, of each warpgroup), STAGES (chunks in flight) and BUFFERS (of operands, 1 or 2).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define FP8 0
#define MXFP8 1
#define NVFP4 2

constexpr int CHUNK_BYTES = 64;  // of a weight row: four threads take 16 each
constexpr int CHUNK_K = FORMAT == NVFP4 ? 128 : 64;
constexpr int STEPS = CHUNK_K / 16;
constexpr int UNIT_STEPS = 4;  // matrix instructions for which operands are made at once
constexpr int UNITS = TILES * STEPS / UNIT_STEPS;
static_assert(UNITS % BUFFERS == 0, "a unit's registers are those of the unit BUFFERS before");
constexpr int THREADS = WARPGROUPS * 128;
constexpr int IMAGE_STAGES = 4;
constexpr int IMAGE_CHUNK = CHUNK_K * TOKENS * 2;
constexpr int SLOTS = TILES * 2;
constexpr int FIFO_BYTES = STAGES * SLOTS * THREADS * 16;
// Scales come for 512 k at a time: of a weight row 4 or 8 bytes to each of the four threads that share it.
constexpr int SPAN = FORMAT == FP8 ? 1 : 512 / CHUNK_K;  // chunks
constexpr int SCALE_PIECE = FORMAT == FP8 ? 0 : FORMAT == MXFP8 ? 4 : 8;
constexpr int SCALES_BYTES = 2 * SLOTS * THREADS * SCALE_PIECE;
static_assert(FORMAT == FP8 || STAGES <= SPAN + 1, "scales of two spans are held");

// Which k, counted in its chunk, the operand's element `slot` (0 to 15) of matrix step `step` stands for.
__device__ __forceinline__ int k_of(int step, int slot) {
    int thread = (slot & 7) >> 1, second = slot >> 3, odd = slot & 1;
    if (FORMAT == FP8) return 16 * thread + 4 * step + 2 * second + odd;
    if (FORMAT == MXFP8) return 16 * thread + 4 * step + 2 * odd + second;
    return 32 * thread + 8 * (step >> 1) + 4 * second + 2 * odd + (step & 1);
}

__device__ __forceinline__ float load_element(const void* rows, int dtype, u64 index) {
    float value;
    if (dtype == 2) return ((const float*)rows)[index];
    u16 bits = ((const u16*)rows)[index];
    if (dtype == 0) return __uint_as_float((u32)bits << 16);
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ u32 to_operand(float value) {
    u16 bits;
    if (FORMAT == MXFP8) {
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    } else {
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    }
    return bits;
}

constexpr int PREPARE_THREADS = 512;

// One block for each of TOKENS rows; those from num_tokens on are zeros. dtype 0: bf16, 1: fp16, 2: fp32.
// Where operands are fp16, a row is multiplied by the power of two that puts its greatest magnitude at 2**14 or more;
// factors[m] undoes it. Image: [k / 16][half][TOKENS][8].
extern "C" __global__ void __launch_bounds__(PREPARE_THREADS) prepare_rows(
    const void* __restrict__ rows, u8* __restrict__ image, float* __restrict__ factors, int num_tokens, int num_k,
    int num_steps, int dtype) {
    asm volatile("griddepcontrol.launch_dependents;");
    __shared__ u32 shared_amax;
    int token = blockIdx.x;
    bool is_real = token < num_tokens;
    u64 start = (u64)token * num_k;
    float scale = 1.0f, factor = 1.0f;
    if (FORMAT != MXFP8) {
        if (threadIdx.x == 0) shared_amax = 0;
        __syncthreads();
        u32 amax = 0;
        if (is_real)
            #pragma unroll 4
            for (int k = threadIdx.x; k < num_k; k += PREPARE_THREADS)
                amax = max(amax, __float_as_uint(load_element(rows, dtype, start + k)) & 0x7FFFFFFF);
        atomicMax(&shared_amax, amax);
        __syncthreads();
        amax = shared_amax;
        if (amax > 0 && amax < 0x7F800000) {
            int shift = min(14 - ((int)(amax >> 23) - 127), 126);
            scale = __uint_as_float((u32)(shift + 127) << 23);
            factor = __uint_as_float((u32)(127 - shift) << 23);
        }
    }
    if (threadIdx.x == 0) factors[token] = factor;
    for (int piece = threadIdx.x; piece < 2 * num_steps; piece += PREPARE_THREADS) {
        int step = piece >> 1, half = piece & 1, chunk = step / STEPS;
        u32 words[4];
        #pragma unroll
        for (int pair = 0; pair < 4; pair++) {
            u32 both[2];
            #pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                int k = chunk * CHUNK_K + k_of(step % STEPS, 8 * half + 2 * pair + odd);
                both[odd] = is_real && k < num_k ? to_operand(load_element(rows, dtype, start + k) * scale) : 0;
            }
            words[pair] = both[0] | both[1] << 16;
        }
        uint4* place = (uint4*)(image + (u64)step * (32 * TOKENS) + half * (16 * TOKENS) + token * 16);
        *place = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return (u32)__cvta_generic_to_shared(pointer);
}

__device__ __forceinline__ void wait_barrier(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra.uni DONE;\nbra.uni AGAIN;\nDONE:\n}"
        ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ u32 scaled_pair(u32 pair, u32 scale) {
    u32 result;
    if (FORMAT == MXFP8) {
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(pair), "r"(scale));
    } else {
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(pair), "r"(scale));
    }
    return result;
}

// Four E4M3 bytes as two pairs of fp16.
__device__ __forceinline__ void unpack_e4m3(u32 word, u32& low, u32& high) {
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}"
        : "=r"(low), "=r"(high) : "r"(word));
}

// Operands of UNIT_STEPS matrix steps: those of one weight row lie in registers 0 and 2 of each step, counted from
// `operand`. Of NVFP4, `words` are the two of one scale's block; of the others the four of a thread's 16 bytes.
__device__ __forceinline__ void make_operands(u32* operand, const u32* words, u32 scale) {
    if (FORMAT == FP8) {
        #pragma unroll
        for (int step = 0; step < 4; step++) unpack_e4m3(words[step], operand[4 * step], operand[4 * step + 2]);
    } else if (FORMAT == MXFP8) {
        // The byte's seven bits under the sign, put where bf16 has exponent and mantissa, mean 2**-120 times as much.
        #pragma unroll
        for (int step = 0; step < 4; step++) {
            u32 word = words[step];
            u32 even = ((word << 8) & 0x80008000) | ((word << 4) & 0x07F007F0);
            u32 odd = (word & 0x80008000) | ((word >> 4) & 0x07F007F0);
            operand[4 * step] = scaled_pair(even, scale);
            operand[4 * step + 2] = scaled_pair(odd, scale);
        }
    } else {
        // E2M1's three bits, put at the end of E4M3's exponent, mean 2**-6 times as much.
        #pragma unroll
        for (int word = 0; word < 2; word++) {
            u32 q = words[word];
            u32 even = ((q << 4) & 0x80808080) | ((q << 2) & 0x1C1C1C1C);
            u32 odd = (q & 0x80808080) | ((q >> 2) & 0x1C1C1C1C);
            u32 low, high;
            unpack_e4m3(even, low, high);
            operand[8 * word] = scaled_pair(low, scale);
            operand[8 * word + 2] = scaled_pair(high, scale);
            unpack_e4m3(odd, low, high);
            operand[8 * word + 4] = scaled_pair(low, scale);
            operand[8 * word + 6] = scaled_pair(high, scale);
        }
    }
}

// The multiplier of the block whose scale lies at `place`, twice. MXFP8: 2**60 times the scale, as bf16, which leaves
// 2**-60; NVFP4: fp16.
__device__ __forceinline__ u32 scale_pair(u32 place) {
    u32 raw, both, unused;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(raw) : "r"(place));
    if (FORMAT == MXFP8) {
        both = raw == 255 ? 0x7FC0u : min(raw + 60, 255u) << 7;
    } else {
        unpack_e4m3(raw, both, unused);
    }
    return __byte_perm(both, 0, 0x1010);
}

// SCALE_PIECE bytes of scales to shared memory, of which num_real exist and the rest are zeros.
__device__ __forceinline__ void load_scales(u32 place, const u8* source, int num_real, const u8* any) {
#if FORMAT != FP8
    bool is_aligned = ((u64)source & (SCALE_PIECE - 1)) == 0;
    if (num_real == 0 || is_aligned) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
            ::"r"(place), "l"(num_real ? source : any), "n"(SCALE_PIECE), "r"(num_real) : "memory");
        return;
    }
    for (int byte = 0; byte < SCALE_PIECE; byte++) {
        u32 scale = byte < num_real ? source[byte] : 0;
        asm volatile("st.shared.u8 [%0], %1;" ::"r"(place + byte), "r"(scale) : "memory");
    }
#endif
}

#if FORMAT == MXFP8
#define KIND "f32.bf16.bf16"
#else
#define KIND "f32.f16.f16"
#endif
#define F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(d, i) F4(d, i), F4(d, i + 4), F4(d, i + 8), F4(d, i + 12)

// d += operand * image, or d = operand * image where `accumulate` is 0.
__device__ __forceinline__ void multiply(float* d, const u32* a, u64 descriptor, int accumulate) {
#if TOKENS == 8
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %9, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16." KIND " {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, p, 1, 1, 0;\n}"
        : F4(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor), "r"(accumulate));
#elif TOKENS == 16
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16." KIND " {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, p, 1, 1, 0;\n}"
        : F4(d, 0), F4(d, 4) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor), "r"(accumulate));
#else
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16." KIND
        " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1, 0;\n}"
        : F16(d, 0), F16(d, 16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor), "r"(accumulate));
#endif
}

template <int LEFT> __device__ __forceinline__ void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Persistent blocks of THREADS; block b takes tiles b, b + gridDim.x, and so on, of tile_rows weight rows each, at most
// WARPGROUPS * TILES * 64. chunks: of a row, filled up to whole spans.
// row_scales: FP8, one a weight row; tensor_scale: NVFP4, one number. weight: row_bytes a row, a multiple of 16.
extern "C" __global__ void __launch_bounds__(THREADS, 1) head_product(
    const u8* __restrict__ weight, const u8* __restrict__ block_scales, const float* __restrict__ row_scales,
    const float* __restrict__ tensor_scale, const u8* __restrict__ image, const float* __restrict__ factors,
    float* __restrict__ out, int num_rows, int num_tokens, int row_bytes, int scale_bytes,
    int chunks, int tile_rows) {
    extern __shared__ __align__(1024) u8 shared[];
    u8* ring = shared + FIFO_BYTES;
    u32 scale_slots = shared_address(ring + IMAGE_STAGES * IMAGE_CHUNK) + threadIdx.x * SCALE_PIECE;
    u32 full = shared_address(ring + IMAGE_STAGES * IMAGE_CHUNK + SCALES_BYTES), empty = full + 8 * IMAGE_STAGES;
    u32 fifo = shared_address(shared) + threadIdx.x * 16;
    int lane = threadIdx.x & 31, group = lane >> 2, quarter = lane & 3, warp = threadIdx.x >> 5;
    int tiles = (num_rows + tile_rows - 1) / tile_rows;
    int own_tiles = (tiles - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
    int total = own_tiles * chunks;
    int first_row = (warp >> 2) * (TILES * 64) + (warp & 3) * 16 + group;

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < IMAGE_STAGES; stage++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full + 8 * stage));
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty + 8 * stage), "n"(WARPGROUPS * 4));
        }
        asm volatile("fence.mbarrier_init.release.cluster;");
    }

    int load_tile = blockIdx.x, load_chunk = 0, load_span = 0;
    auto load_weight = [&](int index, int load_stage) {
        if (index < total) {
            int byte = load_chunk * CHUNK_BYTES + quarter * 16;
            int stop = min(num_rows, (load_tile + 1) * tile_rows);
            #pragma unroll
            for (int slot = 0; slot < SLOTS; slot++) {
                int row = load_tile * tile_rows + first_row + (slot >> 1) * 64 + (slot & 1) * 8;
                bool is_real = row < stop && byte < row_bytes;
                const u8* source = is_real ? weight + (u64)row * row_bytes + byte : weight;
                asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                    ::"r"(fifo + (load_stage * SLOTS + slot) * (THREADS * 16)), "l"(source), "r"(is_real ? 16 : 0)
                    : "memory");
            }
            if (FORMAT != FP8 && load_chunk % SPAN == 0) {
                int place = (load_chunk / SPAN * 4 + quarter) * SCALE_PIECE;
                #pragma unroll
                for (int slot = 0; slot < SLOTS; slot++) {
                    int row = load_tile * tile_rows + first_row + (slot >> 1) * 64 + (slot & 1) * 8;
                    const u8* source = block_scales + (u64)row * scale_bytes + place;
                    load_scales(scale_slots + (load_span * SLOTS + slot) * (THREADS * SCALE_PIECE), source,
                        row < stop ? min(max(scale_bytes - place, 0), SCALE_PIECE) : 0, block_scales);
                }
                load_span ^= 1;
            }
            if (++load_chunk == chunks) {
                load_chunk = 0;
                load_tile += gridDim.x;
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    #pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) load_weight(stage, stage);

    asm volatile("griddepcontrol.wait;" ::: "memory");
    __syncthreads();
    auto load_image = [&](int index) {
        if (index < total) {
            int stage = index % IMAGE_STAGES;
            u32 barrier = full + 8 * stage;
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                ::"r"(barrier), "n"(IMAGE_CHUNK) : "memory");
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                ::"r"(shared_address(ring + stage * IMAGE_CHUNK)), "l"(image + (u64)(index % chunks) * IMAGE_CHUNK),
                "n"(IMAGE_CHUNK), "r"(barrier) : "memory");
        }
    };
    if (threadIdx.x == 0)
        for (int index = 0; index < IMAGE_STAGES - 2; index++) load_image(index);
    __syncwarp();

    float sums[TILES][TOKENS / 2];
    u32 operands[BUFFERS][4 * UNIT_STEPS];
    int stage = 0, chunk = 0, span = 0, tile = blockIdx.x;
    for (int index = 0; index < total; index++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        load_weight(index + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1);
        int use = index % IMAGE_STAGES;
        if (threadIdx.x == 0) {
            int ahead = index + IMAGE_STAGES - 2;
            if (ahead >= IMAGE_STAGES && ahead < total)
                wait_barrier(empty + 8 * (ahead % IMAGE_STAGES), (ahead / IMAGE_STAGES - 1) & 1);
            load_image(ahead);
        }
        __syncwarp();
        // Of the row's four threads each loaded the scales of other chunks: those of one lie in one thread's place.
        int scale_place = FORMAT == MXFP8 ? chunk % SPAN * 2 + (quarter >> 1) : chunk % SPAN * 8 + quarter * 2;
        u32 span_scales = scale_slots - quarter * SCALE_PIECE + span * (SLOTS * THREADS * SCALE_PIECE) + scale_place;
        wait_barrier(full + 8 * use, (index / IMAGE_STAGES) & 1);
        u64 descriptor = (u64)((shared_address(ring + use * IMAGE_CHUNK) & 0x3FFFF) >> 4)
            | (u64)(TOKENS) << 16 | (u64)(128 >> 4) << 32;
        #pragma unroll
        for (int unit = 0; unit < UNITS; unit++) {
            constexpr int PARTS = STEPS / UNIT_STEPS;
            int part = unit % PARTS, row_tile = unit / PARTS;
            u32* operand = operands[unit % BUFFERS];
            wait_products<BUFFERS - 1>();
            // All products of the chunk before are done: its place in the ring is free.
            if (unit == BUFFERS - 1 && index > 0 && lane == 0)
                asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
                    ::"r"(empty + 8 * ((use + IMAGE_STAGES - 1) % IMAGE_STAGES)) : "memory");
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                int slot = 2 * row_tile + half;
                u32 words[4];
                u32 place = fifo + (stage * SLOTS + slot) * (THREADS * 16);
                if (PARTS == 1)
                    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                        : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(place));
                else
                    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];"
                        : "=r"(words[0]), "=r"(words[1]) : "r"(place + 8 * part));
                u32 scale = 0;
                if (FORMAT != FP8) scale = scale_pair(span_scales + slot * (THREADS * SCALE_PIECE) + part);
                make_operands(operand + half, words, scale);
            }
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            #pragma unroll
            for (int step = 0; step < UNIT_STEPS; step++) {
                int place = part * UNIT_STEPS + step;
                multiply(sums[row_tile], operand + 4 * step, descriptor + place * (2 * TOKENS), chunk > 0 || place > 0);
            }
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        }
        if (++stage == STAGES) stage = 0;
        chunk++;
        if (FORMAT != FP8 && chunk % SPAN == 0) span ^= 1;
        if (chunk == chunks) {
            chunk = 0;
            wait_products<0>();
            int stop = min(num_rows, (tile + 1) * tile_rows);
            float common = FORMAT == NVFP4 ? *tensor_scale : 1.0f;
            #pragma unroll
            for (int slot = 0; slot < SLOTS; slot++) {
                int place = tile * tile_rows + first_row + (slot >> 1) * 64 + (slot & 1) * 8;
                if (place < stop) {
                    float scale = FORMAT == FP8 ? row_scales[place] : common;
                    float unscaled = FORMAT == FP8 ? 1.0f : FORMAT == MXFP8 ? 0x1p60f : 64.0f;
                    #pragma unroll
                    for (int pair = 0; pair < TOKENS / 8; pair++)
                        #pragma unroll
                        for (int odd = 0; odd < 2; odd++) {
                            int token = 8 * pair + 2 * quarter + odd;
                            float sum = sums[slot >> 1][4 * pair + 2 * (slot & 1) + odd];
                            if (token < num_tokens)
                                out[(u64)token * num_rows + place] = sum * (factors[token] * unscaled) * scale;
                        }
                }
            }
            tile += gridDim.x;
        }
    }
}
