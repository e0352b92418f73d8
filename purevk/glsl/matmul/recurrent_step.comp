#version 450
#extension GL_GOOGLE_include_directive : enable
// One step of a recurrent layer: the gates of the state, and the state after. For GPUs.
//
// LANES neighbours of a subgroup take one unit of the state, of ROWS rows of the batch: they share the
// columns of the weight, and add up by shuffles. Then each of the first ROWS lanes finishes a row.
// A layer in both directions takes a step of each; what belongs to the second one is as far from the
// first as the parameters hop_… tell.
//
// Buffers: gates (what the input adds to the gates, with its bias), weight [directions * GATES * H, H],
//   bias [directions * GATES * H] (if BIAS), state (before the step) and out (after it), which may be
//   parts of one tensor; for an LSTM also before (the cell before the step) and cell (after it), which
//   may be the same. All are of type T; units are dense.
// Gates are in torch's order, see `recurrent.glslh`. Offsets and strides are in elements.
// Macros:
//   T      float, float16_t or uint16_t (bfloat16)
//   KIND   0: tanh, 1: relu, 2: GRU, 3: LSTM
//   LOCAL  invocations of a workgroup, a multiple of the subgroup size
//   LANES  invocations of a unit, a power of 2, at most the subgroup size and at least ROWS
//   ROWS   rows of an invocation
//   VEC4   1: H, and the offsets and strides of weight and state, are multiples of 4
//   BIAS   1: there is a bias
//   BOTH   1: there are two directions
// Grid: (ceil(H * LANES / LOCAL), ceil(batches / ROWS), directions)
#include "core/common.glslh"
#include "core/elements.glslh"
#include "core/math.glslh"

#ifndef T
#define T float
#endif
#ifndef LOCAL
#define LOCAL 128
#endif
#ifndef LANES
#define LANES 8
#endif
#ifndef ROWS
#define ROWS 1
#endif
#ifndef VEC4
#define VEC4 0
#endif
#ifndef BIAS
#define BIAS 0
#endif
#ifndef BOTH
#define BOTH 0
#endif
#include "matmul/recurrent.glslh"

PARAM(0, batches)
PARAM(1, H)  // units of the state
PARAM(2, offset_gates)
PARAM(3, hop_gates)
PARAM(4, gates_row)  // from one row of the batch to the next
PARAM(5, offset_weight)
PARAM(6, weight_row)
PARAM(7, offset_state)
PARAM(8, hop_state)
PARAM(9, state_row)
PARAM(10, offset_out)
PARAM(11, hop_out)
PARAM(12, out_row)
#if BIAS
PARAM(13, offset_bias)
#endif
#if KIND == 3
PARAM(14, offset_before)
PARAM(15, hop_before)
PARAM(16, before_row)
PARAM(17, offset_cell)
PARAM(18, hop_cell)
PARAM(19, cell_row)
#endif

READONLY_BUFFER(0, gates, T)
#if VEC4
READONLY_BUFFER(1, weight, QUAD_OF(T))
READONLY_BUFFER(2, state, QUAD_OF(T))
#define STATE(i) FLOATS_OF(T, buf_state[(i) >> 2])[(i) & 3]
#else
READONLY_BUFFER(1, weight, T)
READONLY_BUFFER(2, state, T)
#define STATE(i) FLOAT_OF(T, buf_state[i])
#endif
#if BIAS
READONLY_BUFFER(3, bias, T)
#endif
WRITEONLY_BUFFER(3 + BIAS, out, T)
#if KIND == 3
READONLY_BUFFER(4 + BIAS, before, T)
WRITEONLY_BUFFER(5 + BIAS, cell, T)
#endif

layout(local_size_x = LOCAL, local_size_y = 1, local_size_z = 1) in;

LOOPS(loop(ceil(H, LANES)))

void main() {
    int id = int(gl_WorkGroupID.x) * LOCAL + int(gl_LocalInvocationIndex);
    int unit = min(id / LANES, H - 1), lane = id % LANES, row0 = int(gl_WorkGroupID.y) * ROWS;
    int direction = BOTH * int(gl_WorkGroupID.z), first = direction * GATES * H;  // row of the weight
    float sum[GATES][ROWS];
    UNROLL for (int g = 0; g < GATES; g++) UNROLL for (int r = 0; r < ROWS; r++) sum[g][r] = 0.0;
    int from[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) from[r] = offset_state + direction * hop_state + min(row0 + r, batches - 1) * state_row;
#if VEC4
    int quads = H >> 2, row_of_unit = (offset_weight + (first + unit) * weight_row) >> 2, gate = (H * weight_row) >> 2;
    int quad_from[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) quad_from[r] = from[r] >> 2;
    for (int q = lane; q < quads; q += LANES) {
        vec4 w[GATES];
        UNROLL for (int g = 0; g < GATES; g++) w[g] = FLOATS_OF(T, buf_weight[row_of_unit + g * gate + q]);
        UNROLL for (int r = 0; r < ROWS; r++) {
            vec4 state = FLOATS_OF(T, buf_state[quad_from[r] + q]);
            UNROLL for (int g = 0; g < GATES; g++) sum[g][r] += dot(w[g], state);
        }
    }
#else
    for (int k = lane; k < H; k += LANES) {
        float w[GATES];
        UNROLL for (int g = 0; g < GATES; g++) w[g] = FLOAT_OF(T, buf_weight[offset_weight + (first + g * H + unit) * weight_row + k]);
        UNROLL for (int r = 0; r < ROWS; r++) {
            float state = STATE(from[r] + k);
            UNROLL for (int g = 0; g < GATES; g++) sum[g][r] += w[g] * state;
        }
    }
#endif
    UNROLL for (int step = 0; step < LOG2_OF(LANES); step++) {
        UNROLL for (int g = 0; g < GATES; g++) {
            UNROLL for (int r = 0; r < ROWS; r++) sum[g][r] += subgroupShuffleXor(sum[g][r], uint(LANES / 2 >> step));
        }
    }
    float mine[GATES];
    UNROLL for (int g = 0; g < GATES; g++) {
        mine[g] = sum[g][0];
        UNROLL for (int r = 1; r < ROWS; r++) mine[g] = lane == r ? sum[g][r] : mine[g];
    }
    int row = row0 + lane;
    bool finishes = id / LANES < H && lane < ROWS && row < batches;
    float given[GATES], bias[GATES], before = 0.0, cell = 0.0;
    UNROLL for (int g = 0; g < GATES; g++) given[g] = bias[g] = 0.0;
    if (finishes) {
        UNROLL for (int g = 0; g < GATES; g++) {
            given[g] = FLOAT_OF(T, buf_gates[offset_gates + direction * hop_gates + row * gates_row + g * H + unit]);
#if BIAS
            bias[g] = FLOAT_OF(T, buf_bias[offset_bias + first + g * H + unit]);
#endif
        }
#if KIND == 2
        before = STATE(offset_state + direction * hop_state + row * state_row + unit);
#elif KIND == 3
        cell = FLOAT_OF(T, buf_before[offset_before + direction * hop_before + row * before_row + unit]);
#endif
    }
    UNROLL for (int g = 0; g < GATES; g++) mine[g] += bias[g];
    if (!finishes) return;
    float after = state_after(given, mine, before, cell);
    buf_out[offset_out + direction * hop_out + row * out_row + unit] = ELEMENT_OF(T, after);
#if KIND == 3
    buf_cell[offset_cell + direction * hop_cell + row * cell_row + unit] = ELEMENT_OF(T, cell);
#endif
}
