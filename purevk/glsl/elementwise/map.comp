#version 450
#extension GL_GOOGLE_include_directive : enable
// Computes the results at one index by statements that come in as a macro. map.glslh says what the
// statements can name.
//
// Macros:
//   BODY          statements that set r (and r1, ... if there are several results)
//   CALL_COUNTER  a buffer of two words, if defined: calls so far (`calls` for BODY), and workgroups
//                 that are done. The last workgroup adds the call, after all others have read the
//                 number. An invocation then computes several indices
#pragma purevk macro CALL_COUNTER
#include "elementwise/map.glslh"

#ifndef BODY
#define BODY r = X(i0) + 1.0;
#endif

void main() {
#ifdef CALL_COUNTER
    const int calls = CALL_COUNTER[0];
    for (uint id = MAP_ID; MAP_HAS_WORK(id); id += gl_NumWorkGroups.x * gl_NumWorkGroups.y * gl_WorkGroupSize.x) {
        COORDINATES
        BODY
        STORE
    }
    barrier();
    if (gl_LocalInvocationIndex == 0u) {
        memoryBarrierBuffer();
        if (atomicAdd(CALL_COUNTER[1], 1) == int(gl_NumWorkGroups.x * gl_NumWorkGroups.y) - 1) {
            CALL_COUNTER[1] = 0;
            CALL_COUNTER[0]++;
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
