#version 450
#extension GL_GOOGLE_include_directive : enable
// The gated delta rule (Yang et al. 2024), token by token. For each head and token, with the state
// s [values, keys] of the token before:
//   d = beta * (v - decay * s k),  s' = decay * s + d k^T,  out = s' q
//
// LANES neighbours of a subgroup take one row of the state, and keep it in registers: each has every
// LANES-th element. All three dot products of a token are summed at a time, so that it takes one round of shuffles.
//
// Buffers: q, k [steps, key_heads, K], v [steps, heads, V], decay, beta [steps, heads], state and
//   after [heads, V, K] (before the first token and after the last one), out [steps, heads, V]. All
//   are float; their last dims are dense, and decay, beta, state, after and out are dense.
// Macros:
//   K      keys of a head, a multiple of LANES
//   LANES  invocations of a row of the state, a power of 2, at most 8
//   LOCAL  invocations of the workgroup, a multiple of the subgroup size
// Grid: (ceil(V * LANES / LOCAL), heads, 1)
#include "core/common.glslh"

#ifndef K
#define K 16
#endif
#ifndef LANES
#define LANES 1
#endif
#ifndef LOCAL
#define LOCAL 64
#endif

layout(local_size_x = LOCAL) in;
PARAM(0, steps)
PARAM(1, values)
PARAM(2, heads)
PARAM(3, divisor)  // head h reads queries and keys of head h / divisor % key_heads
PARAM(4, key_heads)
PARAM(5, q_offset)
PARAM(6, q_step)
PARAM(7, q_head)
PARAM(8, k_offset)
PARAM(9, k_step)
PARAM(10, k_head)
PARAM(11, v_offset)
PARAM(12, v_step)
PARAM(13, v_head)
PARAM(14, decay_offset)
PARAM(15, beta_offset)
PARAM(16, state_offset)
PARAM(17, out_offset)
PARAM(18, after_offset)
READONLY_BUFFER(0, q, float)
READONLY_BUFFER(1, k, float)
READONLY_BUFFER(2, v, float)
READONLY_BUFFER(3, decay, float)
READONLY_BUFFER(4, beta, float)
READONLY_BUFFER(5, state, float)
WRITEONLY_BUFFER(6, out, float)
WRITEONLY_BUFFER(7, after, float)
#define ELEMENTS (K / LANES)
LOOPS(loop(steps))

void main() {
    int id = int(WORKGROUP_ID.x) * LOCAL + int(gl_LocalInvocationIndex);
    int lane = id % LANES, row = min(id / LANES, values - 1), head = int(WORKGROUP_ID.y);
    int key_head = head / divisor % key_heads, first = (head * values + row) * K + lane;
    float s[ELEMENTS];
    UNROLL for (int i = 0; i < ELEMENTS; i++) s[i] = buf_state[state_offset + first + i * LANES];
    for (int t = 0; t < steps; t++) {
        int at_q = q_offset + t * q_step + key_head * q_head + lane;
        int at_k = k_offset + t * k_step + key_head * k_head + lane;
        float key[ELEMENTS];
        vec3 dots = vec3(0.0);  // s k, s q, k q
        UNROLL for (int i = 0; i < ELEMENTS; i++) {
            float query = buf_q[at_q + i * LANES];
            key[i] = buf_k[at_k + i * LANES];
            dots += vec3(s[i] * key[i], s[i] * query, key[i] * query);
        }
        UNROLL for (int step = 0; step < LOG2_OF(LANES); step++) dots += subgroupShuffleXor(dots, uint(LANES / 2 >> step));
        float decay = buf_decay[decay_offset + t * heads + head];
        float value = buf_v[v_offset + t * v_step + head * v_head + row];
        float delta = buf_beta[beta_offset + t * heads + head] * (value - decay * dots.x);
        UNROLL for (int i = 0; i < ELEMENTS; i++) s[i] = decay * s[i] + delta * key[i];
        if (lane == 0 && id / LANES < values) buf_out[out_offset + (t * heads + head) * values + row] = decay * dots.y + delta * dots.z;
    }
    if (id / LANES < values) {
        UNROLL for (int i = 0; i < ELEMENTS; i++) buf_after[after_offset + first + i * LANES] = s[i];
    }
}
