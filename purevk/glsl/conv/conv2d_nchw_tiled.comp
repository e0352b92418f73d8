#version 450
#extension GL_GOOGLE_include_directive : enable
// 2-D convolution of NCHW images by tiles in shared memory: for GPUs, and for many channels or
// groups of some.
//
// A workgroup makes OUTS * GROUPS_O columns (output channels) for GROUPS_Y x GROUPS_X blocks of
// outputs. An invocation makes OUTS columns of BLOCKS quads; a quad is 4 outputs side by side. A
// workgroup goes over the input channels in steps of DEPTH. The part of a channel that its windows
// cover is in shared memory once for all taps. An invocation reads what its windows cover once:
// with 2 blocks, 24 words for the 576 multiplications of a channel and 3 x 3 taps, and 72 words of
// weights.
//
// Buffers: a (the input), b (the weight [KH, KW, IC, columns of all groups]), bias [columns of all
//   groups] (if BIAS), out (dense NCHW), and what EXTRA_BUFFERS declares.
// Strides and offsets are in elements.
// Macros: OUTS, GROUPS_O, GROUPS_X, GROUPS_Y, BLOCKS, DEPTH; T_A, T_B, T_BIAS, T_OUT, BIAS and
//   EXTRA_BUFFERS as in matmul_io.glslh.
//   UNROLLED  channels whose arithmetic is unrolled (divides DEPTH)
//   AHEAD  1: a step's reads from memory start during the step before, which takes registers
//   ALONG_X  1: the BLOCKS of an invocation are side by side, 4 * GROUPS_X apart; 0: they are one
//     below the other
//   VEC4_A  1: offset_a, W, image_a, channel_a and row_a are multiples of 4
//   VEC4_B  1: offset_b, columns and all_columns are, and the channels of each pixel of a spread
//   VEC4_OUT  1: offset_o and OW are multiples of 4
//   SPREAD_Y, SPREAD_X  each output becomes a block of SPREAD_Y x SPREAD_X pixels of the result:
//     its column (dy, dx, c) is channel c of pixel (dy, dx). OUTS is a multiple of SPREAD_X, OUTS *
//     GROUPS_O of 4 * SPREAD_Y * SPREAD_X. Needs a single group and VEC4_B 1.
//   PAIRS  1: (SPREAD_X 2, VEC4_OUT) OW is a multiple of 8. Neighbours of a subgroup exchange what
//     they store, so that each stores whole sectors of memory.
//   EPILOGUE(v, at, n)  the value to store from the float v = sum + bias, at element `at` of the
//     result, in channel n
//   EPILOGUE4(v, at, n)  (VEC4_OUT) the same for the vec4 of the elements from `at` on
// Shared memory, bytes: `NchwTiles.shared` of ops/conv/nchw_tiles.py.
// Grid: (tiles along x * tiles along y, ceil(columns / (OUTS * GROUPS_O)) * groups, images)
#include "core/common.glslh"
#include "core/elements.glslh"
#pragma purevk macro HAS_8BIT
#ifdef HAS_8BIT
#extension GL_EXT_shader_8bit_storage : require
#endif

#ifndef OUTS
#define OUTS 8
#endif
#ifndef GROUPS_O
#define GROUPS_O 8
#endif
#ifndef GROUPS_X
#define GROUPS_X 16
#endif
#ifndef GROUPS_Y
#define GROUPS_Y 1
#endif
#ifndef BLOCKS
#define BLOCKS 2
#endif
#ifndef DEPTH
#define DEPTH 8
#endif
#ifndef UNROLLED
#define UNROLLED 1
#endif
#ifndef PAIRS
#define PAIRS 0
#endif
#ifndef AHEAD
#define AHEAD 0
#endif
#ifndef ALONG_X
#define ALONG_X 0
#endif
#ifndef SPREAD_Y
#define SPREAD_Y 1
#endif
#ifndef SPREAD_X
#define SPREAD_X 1
#endif
#ifndef T_A
#define T_A float
#endif
#ifndef T_B
#define T_B float
#endif
#ifndef T_BIAS
#define T_BIAS float
#endif
#ifndef T_OUT
#define T_OUT float
#endif
#ifndef VEC4_A
#define VEC4_A 0
#endif
#ifndef VEC4_B
#define VEC4_B 0
#endif
#ifndef VEC4_OUT
#define VEC4_OUT 0
#endif
#ifndef BIAS
#define BIAS 0
#endif
#ifndef EXTRA_BUFFERS
#define EXTRA_BUFFERS
#endif
#ifndef EPILOGUE
#define EPILOGUE(v, at, n) (v)
#endif
#ifndef EPILOGUE4
#define EPILOGUE4(v, at, n) (v)
#endif

#define QUADS_OF_TILE (GROUPS_X * GROUPS_Y)
#define LOCAL (QUADS_OF_TILE * GROUPS_O)
#define TILE_O (OUTS * GROUPS_O)
#define PHASES (SPREAD_Y * SPREAD_X)
#define BLOCKS_X (ALONG_X != 0 ? BLOCKS : 1)
#define BLOCKS_Y (ALONG_X != 0 ? 1 : BLOCKS)

PARAM(0, offset_a)  // of the input in its buffer
PARAM(1, offset_b)  // of the weight
PARAM(2, offset_o)  // of out
#if BIAS
PARAM(3, offset_bias)  // of the bias
#endif
PARAM(4, IC)  // input channels of one group
PARAM(5, columns)  // of one group
PARAM(6, all_columns)  // of all groups
PARAM(7, H)
PARAM(8, W)
PARAM(9, OH)
PARAM(10, OW)
PARAM(11, tiles_x)  // tiles along x
SPEC_CONSTANT(12, KH)
SPEC_CONSTANT(13, KW)
SPEC_CONSTANT(14, stride_y)
SPEC_CONSTANT(15, stride_x)
SPEC_CONSTANT(16, pad_y)  // padding before
SPEC_CONSTANT(17, pad_x)
SPEC_CONSTANT(18, dilation_y)
SPEC_CONSTANT(19, dilation_x)
PARAM(20, image_a)  // strides of the input; that of the column is 1
PARAM(21, channel_a)
PARAM(22, row_a)

#if VEC4_A
READONLY_BUFFER(0, a, QUAD_OF(T_A))
#else
READONLY_BUFFER(0, a, T_A)
#endif
#if VEC4_B
READONLY_BUFFER(1, b, QUAD_OF(T_B))
#else
READONLY_BUFFER(1, b, T_B)
#endif
#if BIAS
READONLY_BUFFER(2, bias, T_BIAS)
#endif
#if VEC4_OUT
WRITEONLY_BUFFER(2 + BIAS, out, QUAD_OF(T_OUT))
#else
WRITEONLY_BUFFER(2 + BIAS, out, T_OUT)
#endif
#define EXTRA_BINDING (3 + BIAS)
EXTRA_BUFFERS

layout(local_size_x = LOCAL, local_size_y = 1, local_size_z = 1) in;

const int TAPS = KH * KW;
// The tile begins LEAD columns before the first window, so that it begins at a multiple of 4.
const int LEAD = VEC4_A != 0 ? (4 - pad_x % 4) % 4 : 0;
const int TILE_W4 = ((4 * GROUPS_X * BLOCKS_X - 1) * stride_x + (KW - 1) * dilation_x + 1 + LEAD + 3) / 4;
const int SPAN_Y = (KH - 1) * dilation_y + 1, SPAN_X = 3 * stride_x + (KW - 1) * dilation_x + 1;
const int TILE_H = (GROUPS_Y * BLOCKS_Y - 1) * stride_y + SPAN_Y;
// Rows that the windows of an invocation cover, and vec4 of each.
const int ROWS = ALONG_X != 0 ? BLOCKS * SPAN_Y : (BLOCKS - 1) * stride_y + SPAN_Y;
const int QUADS = (LEAD + SPAN_X + 3) / 4;
#if VEC4_A
const int A_COUNT = DEPTH * TILE_H * TILE_W4;
#else
const int A_COUNT = DEPTH * TILE_H * TILE_W4 * 4;
#endif
#if VEC4_B
const int B_COUNT = DEPTH * TAPS * TILE_O / 4;
#else
const int B_COUNT = DEPTH * TAPS * TILE_O;
#endif
const int A_SLOTS = (A_COUNT + LOCAL - 1) / LOCAL, B_SLOTS = (B_COUNT + LOCAL - 1) / LOCAL;

shared vec4 tile_a[DEPTH * TILE_H * TILE_W4];
shared vec4 tile_b[DEPTH * TAPS * TILE_O / 4];

vec4 acc[BLOCKS][OUTS];

#if VEC4_A
vec4 next_a[A_SLOTS];
#else
float next_a[A_SLOTS];
#endif
#if VEC4_B
vec4 next_b[B_SLOTS];
#else
float next_b[B_SLOTS];
#endif

// Reads channels from c0 on of the input, from row y0 and column x0 on; what is outside is 0.
void fetch_a(int base, int c0, int y0, int x0) {
    UNROLL for (int s = 0; s < A_SLOTS; s++) {
        int i = int(gl_LocalInvocationIndex) + s * LOCAL;
#if VEC4_A
        int row = i / TILE_W4, x = x0 + (i - row * TILE_W4) * 4;
        next_a[s] = vec4(0.0);
#else
        int row = i / (TILE_W4 * 4), x = x0 + i - row * (TILE_W4 * 4);
        next_a[s] = 0.0;
#endif
        int c = row / TILE_H, y = y0 + row - c * TILE_H;
        if (i < A_COUNT && c0 + c < IC && y >= 0 && y < H && x >= 0 && x < W) {
            int at = base + (c0 + c) * channel_a + y * row_a + x;
#if VEC4_A
            next_a[s] = FLOATS_OF(T_A, buf_a[at >> 2]);
#else
            next_a[s] = FLOAT_OF(T_A, buf_a[at]);
#endif
        }
    }
}

// Reads the weights of these channels: of columns from `first` on in a group, which begins at
// `group`.
void fetch_b(int c0, int group, int first) {
    UNROLL for (int s = 0; s < B_SLOTS; s++) {
        int i = int(gl_LocalInvocationIndex) + s * LOCAL;
#if VEC4_B
        int row = i / (TILE_O / 4), j = i - row * (TILE_O / 4), c = row / TAPS, tap = row - c * TAPS;
        int channels = columns / PHASES, phase = j % PHASES, n = first / PHASES + j / PHASES * 4;
        next_b[s] = vec4(0.0);
        if (i < B_COUNT && c0 + c < IC && n < channels) {
            next_b[s] = FLOATS_OF(T_B, buf_b[(offset_b + (tap * IC + c0 + c) * all_columns + group + phase * channels + n) >> 2]);
        }
#else
        int row = i / TILE_O, n = first + i - row * TILE_O, c = row / TAPS, tap = row - c * TAPS;
        next_b[s] = 0.0;
        if (i < B_COUNT && c0 + c < IC && n < columns) {
            next_b[s] = FLOAT_OF(T_B, buf_b[offset_b + (tap * IC + c0 + c) * all_columns + group + n]);
        }
#endif
    }
}

// Writes what was read to shared memory; phases of a channel become neighbours.
void put_tiles() {
    UNROLL for (int s = 0; s < A_SLOTS; s++) {
        int i = int(gl_LocalInvocationIndex) + s * LOCAL;
#if VEC4_A
        if (i < A_COUNT) tile_a[i] = next_a[s];
#else
        if (i < A_COUNT) tile_a[i >> 2][i & 3] = next_a[s];
#endif
    }
    UNROLL for (int s = 0; s < B_SLOTS; s++) {
        int i = int(gl_LocalInvocationIndex) + s * LOCAL;
#if VEC4_B && PHASES > 1
        int row = i / (TILE_O / 4), j = i - row * (TILE_O / 4);
        int at = row * TILE_O + j / PHASES * 4 * PHASES + j % PHASES;
        if (i < B_COUNT) {
            UNROLL for (int e = 0; e < 4; e++) tile_b[(at + e * PHASES) >> 2][(at + e * PHASES) & 3] = next_b[s][e];
        }
#elif VEC4_B
        if (i < B_COUNT) tile_b[i] = next_b[s];
#else
        if (i < B_COUNT) tile_b[i >> 2][i & 3] = next_b[s];
#endif
    }
}

// Adds up one channel of the tiles. `from` is where the windows begin in it, `b` where its weights
// begin.
void step(int from, int b) {
    float v[ROWS * SPAN_X];
    UNROLL for (int l = 0; l < ROWS; l++) {
#if ALONG_X
        int at = from + l % SPAN_Y * TILE_W4 + l / SPAN_Y * GROUPS_X * stride_x;
#else
        int at = from + l * TILE_W4;
#endif
        UNROLL for (int q = 0; q < QUADS; q++) {
            if (4 * q >= LEAD && 4 * q + 4 <= LEAD + SPAN_X) {
                vec4 four = tile_a[at + q];
                UNROLL for (int e = 0; e < 4; e++) v[l * SPAN_X + 4 * q + e - LEAD] = four[e];
            } else {
                UNROLL for (int e = 0; e < 4; e++) {
                    int k = 4 * q + e - LEAD;
                    if (k >= 0 && k < SPAN_X) v[l * SPAN_X + k] = tile_a[at + q][e];
                }
            }
        }
    }
    UNROLL for (int ky = 0; ky < KH; ky++) {
        UNROLL for (int kx = 0; kx < KW; kx++) {
            vec4 w[OUTS / 4];
            UNROLL for (int o = 0; o < OUTS / 4; o++) w[o] = tile_b[b + (ky * KW + kx) * (TILE_O / 4) + o];
            UNROLL for (int k = 0; k < BLOCKS; k++) {
                int l = (ALONG_X != 0 ? k * SPAN_Y : k * stride_y) + ky * dilation_y, at = l * SPAN_X + kx * dilation_x;
                vec4 a = vec4(v[at], v[at + stride_x], v[at + 2 * stride_x], v[at + 3 * stride_x]);
                UNROLL for (int o = 0; o < OUTS; o++) acc[k][o] += w[o >> 2][o & 3] * a;
            }
        }
    }
}

// Stores 4 neighbours from element `at` on, of which `count` exist.
void put(vec4 v, int at, int n, int count) {
#if VEC4_OUT
    buf_out[(offset_o + at) >> 2] = QUAD_FROM(T_OUT, EPILOGUE4(v, at, n));
#else
    UNROLL for (int e = 0; e < 4; e++) {
        if (e < count) buf_out[offset_o + at + e] = ELEMENT_OF(T_OUT, EPILOGUE(v[e], (at + e), n));
    }
#endif
}

LOOPS(loop(ceil(IC, DEPTH), loop(ceil(DEPTH, UNROLLED))))

void main() {
#if PAIRS
    int id = int(gl_SubgroupID * gl_SubgroupSize + gl_SubgroupInvocationID);
#else
    int id = int(gl_LocalInvocationIndex);
#endif
    int quad = id % QUADS_OF_TILE, tx = quad % GROUPS_X, ty = quad / GROUPS_X, to = id / QUADS_OF_TILE;
    int tile = int(WORKGROUP_ID.x), tile_y = tile / tiles_x, image = int(WORKGROUP_ID.z);
    int x0 = (tile - tile_y * tiles_x) * (4 * GROUPS_X * BLOCKS_X), y0 = tile_y * (GROUPS_Y * BLOCKS_Y);
    int tiles_o = (columns + TILE_O - 1) / TILE_O, group = int(WORKGROUP_ID.y) / tiles_o;
    int first = (int(WORKGROUP_ID.y) - group * tiles_o) * TILE_O;
    int base = offset_a + image * image_a + group * IC * channel_a;
    int from = ty * BLOCKS_Y * stride_y * TILE_W4 + tx * stride_x;
    UNROLL for (int k = 0; k < BLOCKS; k++) {
        UNROLL for (int o = 0; o < OUTS; o++) acc[k][o] = vec4(0.0);
    }
    int from_y = y0 * stride_y - pad_y, from_x = x0 * stride_x - pad_x - LEAD;
#if AHEAD
    fetch_a(base, 0, from_y, from_x);
    fetch_b(0, group * columns, first);
#endif
    [[dont_unroll]] for (int c0 = 0; c0 < IC; c0 += DEPTH) {
#if !AHEAD
        fetch_a(base, c0, from_y, from_x);
        fetch_b(c0, group * columns, first);
#endif
        barrier();
        put_tiles();
        barrier();
#if AHEAD
        if (c0 + DEPTH < IC) {
            fetch_a(base, c0 + DEPTH, from_y, from_x);
            fetch_b(c0 + DEPTH, group * columns, first);
        }
#endif
        [[dont_unroll]] for (int c = 0; c < DEPTH; c += UNROLLED) {
            UNROLL for (int u = 0; u < UNROLLED; u++) {
                step(from + (c + u) * TILE_H * TILE_W4, (c + u) * TAPS * (TILE_O / 4) + to * (OUTS / 4));
            }
        }
    }
    int channels = columns / PHASES, all = all_columns / PHASES;
    UNROLL for (int o = 0; o < OUTS; o += SPREAD_X) {
        int column = first + to * OUTS + o, n = column / PHASES, dy = (column - n * PHASES) / SPREAD_X;
        bool there = n < channels;
        n += group * channels;
        float bias[SPREAD_X];
        UNROLL for (int d = 0; d < SPREAD_X; d++) {
#if BIAS
            bias[d] = FLOAT_OF(T_BIAS, buf_bias[offset_bias + min((dy * SPREAD_X + d) * all + n, all_columns - 1)]);
#else
            bias[d] = 0.0;
#endif
        }
        UNROLL for (int k = 0; k < BLOCKS; k++) {
            int x = x0 + (tx + (ALONG_X != 0 ? k * GROUPS_X : 0)) * 4, y = y0 + ty * BLOCKS_Y + (ALONG_X != 0 ? 0 : k);
            int at = ((image * all + n) * OH * SPREAD_Y + y * SPREAD_Y + dy) * OW * SPREAD_X + x * SPREAD_X;
            float row[4 * SPREAD_X];
            UNROLL for (int d = 0; d < SPREAD_X; d++) {
                UNROLL for (int e = 0; e < 4; e++) row[e * SPREAD_X + d] = acc[k][o + d][e] + bias[d];
            }
#if PAIRS
            vec4 low = vec4(row[0], row[1], row[2], row[3]), high = vec4(row[4], row[5], row[6], row[7]);
            bool odd = (tx & 1) != 0;
            vec4 other = subgroupShuffleXor(odd ? low : high, 1u);
            if (there && x < OW && y < OH) {
                put(odd ? other : low, odd ? at - 4 : at, n, 4);
                put(odd ? high : other, odd ? at + 4 : at + 8, n, 4);
            }
#else
            if (there && x < OW && y < OH) {
                UNROLL for (int d = 0; d < SPREAD_X; d++) {
                    vec4 v = vec4(row[4 * d], row[4 * d + 1], row[4 * d + 2], row[4 * d + 3]);
                    put(v, at + 4 * d, n, (OW - x) * SPREAD_X - 4 * d);
                }
            }
#endif
        }
    }
}
