#version 450
#extension GL_GOOGLE_include_directive : enable
// One step of a recurrent layer: the gates of the state, and the state after. For GPUs.
//
// LANES neighbours of a subgroup take one unit of the state, of ROWS rows of the batch: they share the
// columns of the weight, and add up by shuffles. Then each of the first ROWS lanes finishes a row.
//
// Buffers: gates (what the input adds to the gates, with its bias), weight [GATES * H, H], bias
//   [GATES * H] (if BIAS), state (before the step) and out (after it), which may be parts of one tensor;
//   for an LSTM also before (the cell before the step) and cell (after it), which may be the same. All
//   are of type T; units are dense.
// Gates are in torch's order: LSTM input, forget, cell, output; GRU reset, update, new.
// Offsets and strides are in elements.
// Macros:
//   T      float, float16_t or uint16_t (bfloat16)
//   KIND   0: tanh, 1: relu, 2: GRU, 3: LSTM
//   LOCAL  invocations of a workgroup, a multiple of the subgroup size
//   LANES  invocations of a unit, a power of 2, at most the subgroup size and at least ROWS
//   ROWS   rows of an invocation
//   VEC4   1: H, and the offsets and strides of weight and state, are multiples of 4
//   BIAS   1: there is a bias
// Grid: (ceil(H * LANES / LOCAL), ceil(batches / ROWS), 1)
#include "core/common.glslh"
#include "core/elements.glslh"
#include "core/math.glslh"

#ifndef T
#define T float
#endif
#ifndef KIND
#define KIND 0
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
#if KIND == 3
#define GATES 4
#elif KIND == 2
#define GATES 3
#else
#define GATES 1
#endif

PARAM(0, batches)
PARAM(1, H)  // units of the state
PARAM(2, offset_gates)
PARAM(3, gates_row)  // from one row of the batch to the next
PARAM(4, offset_weight)
PARAM(5, weight_row)
PARAM(6, offset_state)
PARAM(7, state_row)
PARAM(8, offset_out)
PARAM(9, out_row)
#if BIAS
PARAM(10, offset_bias)
#endif
#if KIND == 3
PARAM(11, offset_before)
PARAM(12, before_row)
PARAM(13, offset_cell)
PARAM(14, cell_row)
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

float sigmoid(float v) { return 1.0 / (1.0 + exp(-v)); }

void main() {
    int id = int(gl_WorkGroupID.x) * LOCAL + int(gl_LocalInvocationIndex);
    int unit = min(id / LANES, H - 1), lane = id % LANES, row0 = int(gl_WorkGroupID.y) * ROWS;
    float sum[GATES][ROWS];
    UNROLL for (int g = 0; g < GATES; g++) UNROLL for (int r = 0; r < ROWS; r++) sum[g][r] = 0.0;
    int from[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) from[r] = offset_state + min(row0 + r, batches - 1) * state_row;
#if VEC4
    for (int k = 4 * lane; k < H; k += 4 * LANES) {
        vec4 w[GATES];
        UNROLL for (int g = 0; g < GATES; g++) {
            w[g] = FLOATS_OF(T, buf_weight[(offset_weight + (g * H + unit) * weight_row + k) >> 2]);
        }
        UNROLL for (int r = 0; r < ROWS; r++) {
            vec4 state = FLOATS_OF(T, buf_state[(from[r] + k) >> 2]);
            UNROLL for (int g = 0; g < GATES; g++) sum[g][r] += dot(w[g], state);
        }
    }
#else
    for (int k = lane; k < H; k += LANES) {
        float w[GATES];
        UNROLL for (int g = 0; g < GATES; g++) w[g] = FLOAT_OF(T, buf_weight[offset_weight + (g * H + unit) * weight_row + k]);
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
    if (id / LANES >= H || lane >= ROWS || row >= batches) return;
    float given[GATES];
    UNROLL for (int g = 0; g < GATES; g++) {
        given[g] = FLOAT_OF(T, buf_gates[offset_gates + row * gates_row + g * H + unit]);
#if BIAS
        mine[g] += FLOAT_OF(T, buf_bias[offset_bias + g * H + unit]);
#endif
    }
    int to = offset_out + row * out_row + unit;
#if KIND == 0
    buf_out[to] = ELEMENT_OF(T, pv_tanh(given[0] + mine[0]));
#elif KIND == 1
    buf_out[to] = ELEMENT_OF(T, pv_max(given[0] + mine[0], 0.0));
#elif KIND == 2
    float before = STATE(offset_state + row * state_row + unit);
    float reset = sigmoid(given[0] + mine[0]), update = sigmoid(given[1] + mine[1]);
    float made = pv_tanh(given[2] + reset * mine[2]);
    buf_out[to] = ELEMENT_OF(T, made + update * (before - made));
#else
    float before = FLOAT_OF(T, buf_before[offset_before + row * before_row + unit]);
    float let_in = sigmoid(given[0] + mine[0]), keep = sigmoid(given[1] + mine[1]), show = sigmoid(given[3] + mine[3]);
    float after = keep * before + let_in * pv_tanh(given[2] + mine[2]);
    buf_cell[offset_cell + row * cell_row + unit] = ELEMENT_OF(T, after);
    buf_out[to] = ELEMENT_OF(T, show * pv_tanh(after));
#endif
}
