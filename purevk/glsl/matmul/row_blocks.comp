#version 450
#extension GL_GOOGLE_include_directive : enable
// Rows of 16 bits in the order of fragments, as a left operand (fragment_blocks.glslh). What fills the
// last block of rows repeats the last row.
//
// Buffers: in (rows start at multiples of 4 elements), out.
// Parameters: M rows, K elements of each, a multiple of 16; `ld` elements from one row to the next.
// Grid: ceil(ceil(M / 16) * K * 2 / local_size_x), spread over y: an invocation makes 8 elements
#include "core/common.glslh"

PARAM(0, M)
PARAM(1, K)
PARAM(2, ld)
#undef PARAM_DEFAULT
#define PARAM_DEFAULT 0
PARAM(3, offset_in)
PARAM(4, offset_out)

layout(local_size_x_id = 100) in;
READONLY_BUFFER(0, in, uvec2)
WRITEONLY_BUFFER(1, out, uvec4)

void main() {
    int i = int(WORKGROUP_ID.x + WORKGROUP_ID.y * gl_NumWorkGroups.x) * int(gl_WorkGroupSize.x) + int(gl_LocalInvocationIndex);
    if (i >= (M + 15) / 16 * K * 2) return;
    int block = i / 32, lane = i % 32, row = block / (K / 16) * 16 + lane / 4;
    int at = offset_in / 4 + block % (K / 16) * 4 + lane % 4, pitch = ld / 4;
    buf_out[offset_out / 8 + i] = uvec4(buf_in[at + min(row, M - 1) * pitch], buf_in[at + min(row + 8, M - 1) * pitch]);
}
