#version 450
#extension GL_GOOGLE_include_directive : enable
#ifndef COOPMAT
#define COOPMAT 0
#endif
#ifndef BFLOAT16
#define BFLOAT16 0
#endif
#if COOPMAT
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#if BFLOAT16
#extension GL_EXT_bfloat16 : require
#extension GL_EXT_shader_explicit_arithmetic_types_int16 : require
#endif
#endif
// 2-D convolution of one group, 16 bits, as an implicit matmul on matrix cores without shared memory.
// Images are NHWC. Invocations load their elements of fragments directly, 8 channels of a pixel at a
// time: the weight is in the order of fragments (fragment_blocks.glslh), and the channels of pixels are
// as they are. Sums are float.
//
// The elements of fragments of 16 x 16 x 16 must be where fragments.glslh says, those of the right
// operand too, so the device has to be tested first.
//
// Buffers and parameters: as conv2d.comp, but ldb, and row_a. Pixels of a row may overlap.
//   The weight is [OC / 16, IC / 32 * KH * KW, 512]: for 16 output channels and a tap of 32 channels
//   RIGHT_ELEMENT of fragment_blocks.glslh. All taps of 32 channels follow one another, since pixels
//   that several taps read are in the first cache then.
// Macros: those of matmul_io.glslh, VEC8_A, VEC8_B and VEC4_OUT 1, and
//   WINDOW       0: KH, KW and the strides are 1, the padding is 0 (1)
//   SUBGROUPS_M, SUBGROUPS_N   subgroups of a workgroup along rows and columns (2, 2)
//   FRAGMENTS_M, FRAGMENTS_N   fragments of a subgroup along rows and columns (2, 2)
//   SLICES       subgroups that share the terms of the same results, and add up in shared memory (1):
//     (SLICES - 1) * SUBGROUPS_M * SUBGROUPS_N * FRAGMENTS_M * FRAGMENTS_N * 1024 bytes
//   TURN         steps of 32 channels in a turn of the loop; those of a slice are a multiple of it (1)
//   CHANNELS     of 32, how many are used, an even number: the others are read as zeros (32)
//   EXTRAS_EARLY  with COOPMAT, 1: what the epilogue reads for the results is read before the loop, if
//     it is read at once: it takes 2 * EXTRAS_WORDS registers for each fragment meanwhile (0)
//   BFLOAT16     with COOPMAT, 1: the operands are bfloat16. Needs a compiler that knows GL_EXT_bfloat16
//   COOPMAT      0: the same in scalar arithmetic, for tests on devices without matrix cores. llvmpipe
//     ends loops after 65535 steps: 7700 terms * FRAGMENTS_M * FRAGMENTS_N / SLICES
// IC is a multiple of 32, OC of 16, KH * KW at most 31. A pixel starts at a multiple of 8 elements.
// The epilogue gets b = 0, m = output pixel (batch * OH + y) * OW + x, and n = output channel.
// Grid: (ceil(OC / (16 * FRAGMENTS_N * SUBGROUPS_N)),
//        ceil(batches * OH * OW / (16 * FRAGMENTS_M * SUBGROUPS_M))).
#include "core/common.glslh"
#ifndef WINDOW
#define WINDOW 1
#endif
#ifndef SUBGROUPS_M
#define SUBGROUPS_M 2
#endif
#ifndef SUBGROUPS_N
#define SUBGROUPS_N 2
#endif
#ifndef FRAGMENTS_M
#define FRAGMENTS_M 2
#endif
#ifndef FRAGMENTS_N
#define FRAGMENTS_N 2
#endif
#ifndef SLICES
#define SLICES 1
#endif
#define FRAGMENT_N 16
#ifndef TURN
#define TURN 1
#endif
#ifndef CHANNELS
#define CHANNELS 32
#endif
#ifndef EXTRAS_EARLY
#define EXTRAS_EARLY 0
#endif
#ifndef VEC8_A
#define VEC8_A 1
#endif
#ifndef VEC8_B
#define VEC8_B 1
#endif
#ifndef VEC4_OUT
#define VEC4_OUT 1
#endif

PARAM(0, batches)
PARAM(1, H)
PARAM(2, W)
PARAM(3, IC)
PARAM(4, OH)
PARAM(5, OW)
PARAM(6, OC)
PARAM(7, pixel_a)
PARAM(8, pixel_o)
PARAM(9, row_a)  // elements from one row of an image to the next; those of a batch follow one another
PARAM(10, KH)
PARAM(11, KW)
PARAM(12, stride_y)
PARAM(13, stride_x)
PARAM(14, pad_y)
PARAM(15, pad_x)
PARAM(16, dilation_y)
PARAM(17, dilation_x)
#undef PARAM_DEFAULT
#define PARAM_DEFAULT 0
PARAM(18, offset_a)
PARAM(19, offset_b)
PARAM(20, offset_o)
PARAM(21, offset_bias)

#include "matmul/matmul_io.glslh"
#include "core/fragments.glslh"
#include "matmul/fragment_blocks.glslh"

#define RESULTS (SUBGROUPS_M * SUBGROUPS_N)  // subgroups with results of their own
// Where a turn is a single step, a compiler may unroll the loop over K if that is worth the code, which
// is in no cache where the kernel runs once: not for large tiles, which overlap enough, nor for small
// ones, whose loop is short.
#if TURN > 1 || FRAGMENTS_M * FRAGMENTS_N > 8 || RESULTS == 1
#define LOOP ROLL
#else
#define LOOP
#endif
layout(local_size_x = 32 * RESULTS * SLICES, local_size_y = 1, local_size_z = 1) in;

#if COOPMAT
#define EACH UNROLL
#define SUB int(gl_SubgroupID)
#define LANE int(gl_SubgroupInvocationID)
#define SUMS(name) coopmat<float, gl_ScopeSubgroup, 16, 16, gl_MatrixUseAccumulator> name
#if BFLOAT16
#define LOADED bfloat16_t
#define PAIR bf16vec2
#define PAIR_OF(word) uintBitsToBFloat16EXT(unpack16(word))
#else
#define LOADED float16_t
#define PAIR f16vec2
#define PAIR_OF(word) unpackFloat2x16(word)
#endif
// Half a fragment: 4 terms of a row (or column), of the first 8 rows or of the others.
#define FILL(fragment, half, word0, word1)                        \
    {                                                             \
        PAIR low = PAIR_OF(word0), high = PAIR_OF(word1);         \
        fragment[4 * half] = low[0];                              \
        fragment[4 * half + 1] = low[1];                          \
        fragment[4 * half + 2] = high[0];                         \
        fragment[4 * half + 3] = high[1];                         \
    }
#else
#define EACH  // small code, which a software device compiles in time
#define SUB int(gl_LocalInvocationIndex / 32u)
#define LANE int(gl_LocalInvocationIndex % 32u)
#define SUMS(name) float name[8]
float element_of(uint word, int odd) {
    uint bits = odd == 1 ? word >> 16 : word & 0xffffu;
#if BFLOAT16
    return uintBitsToFloat(bits << 16);
#else
    return unpackHalf2x16(bits).x;
#endif
}
#endif
#if SLICES > 1
shared vec4 parts[(SLICES - 1) * RESULTS * FRAGMENTS_M * FRAGMENTS_N * 64];
#endif

#define ROWS (batches * OH * OW)
#define TAPS (KH * KW)
#define UNITS (IC / 32 * TAPS)  // taps of 32 channels
#define ROW_OF(i, h) min((block_m + i) * 16 + lane / 4 + 8 * h, ROWS - 1)
#define COLUMN_OF(j) (min(block_n + j, OC / 16 - 1) * 16 + lane % 4 * 4)

#if FRAGMENTS_M * FRAGMENTS_N * 2 * EXTRAS_WORDS <= 64
#define EXTRAS_AT_ONCE 1
#else
#define EXTRAS_AT_ONCE 0
#endif
#define READ_ALL_EXTRAS                                                                                    \
    {                                                                                                      \
        EACH for (int j = 0; j < FRAGMENTS_N; j++) {                                                       \
            EACH for (int i = 0; i < FRAGMENTS_M; i++) {                                                   \
                EACH for (int h = 0; h < 2; h++) extras[j][i][h] = extras4(0, ROW_OF(i, h), COLUMN_OF(j)); \
            }                                                                                              \
        }                                                                                                  \
    }

// Of each row that an invocation reads: where its window starts, and a bit for each tap in the image.
int row_at[FRAGMENTS_M][2];
uint row_taps[FRAGMENTS_M][2];
// What is read next: a tap, where it is behind the start of a window, and which 32 of its channels.
int tap, tap_x, tap_at, group;

void find_row(int i, int h, int m) {
#if WINDOW
    int row = m / OW, image = row / OH;
    int y = (row - image * OH) * stride_y - pad_y, x = (m - row * OW) * stride_x - pad_x;
    row_at[i][h] = offset_a + (image * H + y) * row_a + x * pixel_a;
    uint columns = 0u, taps = 0u;
    for (int k = 0; k < KW; k++) {
        if (x + k * dilation_x >= 0 && x + k * dilation_x < W) columns |= 1u << k;
    }
    for (int k = 0; k < KH; k++) {
        if (y + k * dilation_y >= 0 && y + k * dilation_y < H) taps |= columns << (k * KW);
    }
    row_taps[i][h] = taps;
#else
    row_at[i][h] = offset_a + m * pixel_a;
#endif
}

void start_at(int unit) {
    group = unit / TAPS;
    tap = unit - group * TAPS;
    tap_x = tap % KW;
    tap_at = tap / KW * dilation_y * row_a + tap_x * dilation_x * pixel_a;
}

// Behind the last one, the last channels are read once more.
void advance() {
#if WINDOW
    tap++;
    tap_x++;
    tap_at += dilation_x * pixel_a;
    if (tap_x == KW) {
        tap_x = 0;
        tap_at += dilation_y * row_a - KW * dilation_x * pixel_a;
    }
    if (tap == TAPS) {
        tap = tap_at = 0;
        group = min(group + 1, IC / 32 - 1);
    }
#else
    group = min(group + 1, IC / 32 - 1);
#endif
}

// 8 channels from `channel` on, of 32, of the present tap of a row. A tap beside the image may have an
// address outside of the buffer.
uvec4 load_a(int i, int h, int channel) {
    int at = row_at[i][h] + tap_at + group * 32 + channel;
#if WINDOW
    uvec4 words = ((row_taps[i][h] >> tap) & 1u) != 0u ? buf_a[at >> 3] : uvec4(0u);
#else
    uvec4 words = buf_a[at >> 3];
#endif
#if CHANNELS < 32
    UNROLL for (int w = 0; w < 4; w++) {
        if (channel / 8 * 8 + 2 * w >= CHANNELS) words[w] = 0u;
    }
#endif
    return words;
}

#if COOPMAT
LOOPS(loop(KH * KW * ceil(IC, 16)) + loop(KH) + loop(KW))
#else
LOOPS(loop(FRAGMENTS_M, loop(FRAGMENTS_N, loop(8, loop(KH * KW * ceil(IC, 32) + 1, loop(32) + loop(KH) + loop(KW))))))
#endif

void main() {
    int lane = LANE, slice = SUB / RESULTS, sub = SUB % RESULTS;
    int block_m = (int(WORKGROUP_ID.y) * SUBGROUPS_M + sub / SUBGROUPS_N) * FRAGMENTS_M;
    int block_n = (int(WORKGROUP_ID.x) * SUBGROUPS_N + sub % SUBGROUPS_N) * FRAGMENTS_N;
    int share = (UNITS + SLICES - 1) / SLICES, first = slice * share, last = min(first + share, UNITS);
    SUMS(sums[FRAGMENTS_M][FRAGMENTS_N]);
#if EXTRAS_AT_ONCE
    EXTRAS extras[FRAGMENTS_N][FRAGMENTS_M][2];
#endif
#if COOPMAT
    int at_b[FRAGMENTS_N];
    UNROLL for (int i = 0; i < FRAGMENTS_M; i++) {
        UNROLL for (int h = 0; h < 2; h++) find_row(i, h, ROW_OF(i, h));
    }
    UNROLL for (int j = 0; j < FRAGMENTS_N; j++) {
        at_b[j] = offset_b / 8 + min(block_n + j, OC / 16 - 1) * UNITS * 64 + lane;
    }
    UNROLL for (int i = 0; i < FRAGMENTS_M; i++) {
        UNROLL for (int j = 0; j < FRAGMENTS_N; j++) {
            sums[i][j] = coopmat<float, gl_ScopeSubgroup, 16, 16, gl_MatrixUseAccumulator>(0.0);
        }
    }
    uvec4 next_a[FRAGMENTS_M][2], next_b[FRAGMENTS_N][2];
    int channel = lane % 4 * 8, start = min(first, UNITS - 1);
    start_at(start);
    UNROLL for (int h = 0; h < 2; h++) {
        UNROLL for (int i = 0; i < FRAGMENTS_M; i++) next_a[i][h] = load_a(i, h, channel);
        UNROLL for (int j = 0; j < FRAGMENTS_N; j++) next_b[j][h] = buf_b[at_b[j] + start * 64 + h * 32];
    }
#if EXTRAS_EARLY && EXTRAS_AT_ONCE
    if (slice == 0) READ_ALL_EXTRAS
#endif
    LOOP for (int turn = first; turn < last; turn += TURN) {
        UNROLL for (int t = 0; t < TURN; t++) {
            coopmat<LOADED, gl_ScopeSubgroup, 16, 16, gl_MatrixUseA> a[2][FRAGMENTS_M];
            coopmat<LOADED, gl_ScopeSubgroup, 16, 16, gl_MatrixUseB> b[2][FRAGMENTS_N];
            UNROLL for (int s = 0; s < 2; s++) {
                UNROLL for (int h = 0; h < 2; h++) {
                    UNROLL for (int i = 0; i < FRAGMENTS_M; i++) FILL(a[s][i], h, next_a[i][h][2 * s], next_a[i][h][2 * s + 1])
                    UNROLL for (int j = 0; j < FRAGMENTS_N; j++) FILL(b[s][j], h, next_b[j][h][2 * s], next_b[j][h][2 * s + 1])
                }
            }
            advance();
            int then = min(turn + t + 1, UNITS - 1) * 64;
            UNROLL for (int h = 0; h < 2; h++) {
                UNROLL for (int i = 0; i < FRAGMENTS_M; i++) next_a[i][h] = load_a(i, h, channel);
                UNROLL for (int j = 0; j < FRAGMENTS_N; j++) next_b[j][h] = buf_b[at_b[j] + then + h * 32];
            }
            UNROLL for (int s = 0; s < 2; s++) {
                UNROLL for (int j = 0; j < FRAGMENTS_N; j++) {
                    UNROLL for (int i = 0; i < FRAGMENTS_M; i++) sums[i][j] = coopMatMulAdd(a[s][i], b[s][j], sums[i][j]);
                }
            }
        }
    }
#else
    for (int i = 0; i < FRAGMENTS_M; i++) {
        for (int j = 0; j < FRAGMENTS_N; j++) {
            int at_b = offset_b + min(block_n + j, OC / 16 - 1) * UNITS * 512;
            for (int e = 0; e < 8; e++) {
                sums[i][j][e] = 0.0;
                find_row(i, 0, min((block_m + i) * 16 + SUM_ROW(lane, e), ROWS - 1));
                start_at(min(first, UNITS - 1));
                for (int unit = first; unit < last; unit++) {
                    for (int channel = 0; channel < 32; channel++) {
                        int at = at_b + unit * 512 + RIGHT_ELEMENT(channel, BLOCK_COLUMN(SUM_COLUMN(lane, e)));
                        sums[i][j][e] += element_of(load_a(i, 0, channel)[channel % 8 / 2], channel % 2) *
                                         element_of(buf_b[at >> 3][at % 8 / 2], at % 2);
                    }
                    advance();
                }
            }
        }
    }
#endif
#if SLICES > 1
#define PART(s, i, j, h) parts[((((s) * RESULTS + sub) * FRAGMENTS_M + i) * FRAGMENTS_N + j) * 64 + (h) * 32 + lane]
    if (slice > 0) {
        EACH for (int i = 0; i < FRAGMENTS_M; i++) {
            EACH for (int j = 0; j < FRAGMENTS_N; j++) {
                EACH for (int h = 0; h < 2; h++) {
                    PART(slice - 1, i, j, h) =
                        vec4(sums[i][j][4 * h], sums[i][j][4 * h + 1], sums[i][j][4 * h + 2], sums[i][j][4 * h + 3]);
                }
            }
        }
    }
    barrier();
    if (slice > 0) return;
#endif
    // What the epilogue reads for all results of an invocation is in flight together, if that takes few
    // registers; else what it reads for a column of fragments. Rows and columns behind the last ones
    // read what those do.
#if EXTRAS_AT_ONCE && !(EXTRAS_EARLY && COOPMAT)
    READ_ALL_EXTRAS
#endif
    EACH for (int j = 0; j < FRAGMENTS_N; j++) {
        if (block_n + j >= OC / 16) continue;
        int n = COLUMN_OF(j);
        vec4 bias = bias4(n, OC);
#if !EXTRAS_AT_ONCE
        EXTRAS extras[1][FRAGMENTS_M][2];
        EACH for (int i = 0; i < FRAGMENTS_M; i++) {
            EACH for (int h = 0; h < 2; h++) extras[0][i][h] = extras4(0, ROW_OF(i, h), n);
        }
#endif
        EACH for (int i = 0; i < FRAGMENTS_M; i++) {
            EACH for (int h = 0; h < 2; h++) {
                int m = (block_m + i) * 16 + lane / 4 + 8 * h;
                vec4 sum = vec4(sums[i][j][4 * h], sums[i][j][4 * h + 1], sums[i][j][4 * h + 2], sums[i][j][4 * h + 3]);
#if SLICES > 1
                EACH for (int s = 0; s < SLICES - 1; s++) sum += PART(s, i, j, h);
#endif
                vec4 value = value4(sum + bias, extras[EXTRAS_AT_ONCE * j][i][h], 0, ROW_OF(i, h), n);
                if (m < ROWS) buf_out[(offset_o + m * pixel_o + n) >> 2] = QUAD_FROM(T_OUT, value);
            }
        }
    }
}
