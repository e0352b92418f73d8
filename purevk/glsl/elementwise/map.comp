#version 450
#extension GL_GOOGLE_include_directive : enable
// The results at one place are computed by statements that come in as a macro; map.glslh says what
// they can name.
//
// BODY  statements that set r (and r1, ... if there are several results).
// COUNTED  if defined, a buffer of two words, calls and workgroups that are done: the last
// workgroup counts the call. It is
//   written once all others have read it, so that they see the same number, `calls`. An invocation
//   goes over several places.
#pragma purevk macro COUNTED
#include "elementwise/map.glslh"

#ifndef BODY
#define BODY r = X(i0) + 1.0;
#endif

void main() {
#ifdef COUNTED
    const int calls = COUNTED[0];
    for (uint id = MAP_ID; MAP_HAS_WORK(id); id += gl_NumWorkGroups.x * gl_NumWorkGroups.y * gl_WorkGroupSize.x) {
        COORDINATES
        BODY
        STORE
    }
    barrier();
    if (gl_LocalInvocationIndex == 0u) {
        memoryBarrierBuffer();
        if (atomicAdd(COUNTED[1], 1) == int(gl_NumWorkGroups.x * gl_NumWorkGroups.y) - 1) {
            COUNTED[1] = 0;
            COUNTED[0]++;
        }
    }
#else
    uint id = MAP_ID;
    if (MAP_HAS_WORK(id)) {
        COORDINATES
        BODY
        STORE
    }
#endif
}
