/* Visible twins for the functions of Debian's static libshaderc that purevk calls.
 *
 * In the archive these functions are hidden symbols, so a shared library linked from it would export none of them.
 * link_shaderc.sh renames each to `archive_<name>` in its own copy of the archive; the twin here takes the name back
 * and is exported. */
#include <shaderc/shaderc.h>

#define TWIN(type, name, parameters, arguments)          \
    extern type archive_##name parameters;               \
    __attribute__((visibility("default"))) type name parameters { return archive_##name arguments; }

/* The same for functions that give nothing back (ISO C has no `return` of a void expression). */
#define TWIN_VOID(name, parameters, arguments)           \
    extern void archive_##name parameters;               \
    __attribute__((visibility("default"))) void name parameters { archive_##name arguments; }

TWIN(shaderc_compiler_t, shaderc_compiler_initialize, (void), ())
TWIN_VOID(shaderc_compiler_release, (shaderc_compiler_t compiler), (compiler))
TWIN(shaderc_compile_options_t, shaderc_compile_options_initialize, (void), ())
TWIN_VOID(shaderc_compile_options_release, (shaderc_compile_options_t options), (options))
TWIN_VOID(shaderc_compile_options_add_macro_definition,
          (shaderc_compile_options_t options, const char* name, size_t name_length, const char* value,
           size_t value_length),
          (options, name, name_length, value, value_length))
TWIN_VOID(shaderc_compile_options_set_optimization_level,
          (shaderc_compile_options_t options, shaderc_optimization_level level), (options, level))
TWIN_VOID(shaderc_compile_options_set_target_env,
          (shaderc_compile_options_t options, shaderc_target_env target, uint32_t version),
          (options, target, version))
TWIN_VOID(shaderc_compile_options_set_target_spirv,
          (shaderc_compile_options_t options, shaderc_spirv_version version), (options, version))
TWIN_VOID(shaderc_compile_options_set_generate_debug_info, (shaderc_compile_options_t options), (options))
TWIN(shaderc_compilation_result_t, shaderc_compile_into_spv,
     (const shaderc_compiler_t compiler, const char* source, size_t source_size, shaderc_shader_kind kind,
      const char* input_file_name, const char* entry_point_name, const shaderc_compile_options_t options),
     (compiler, source, source_size, kind, input_file_name, entry_point_name, options))
TWIN_VOID(shaderc_result_release, (shaderc_compilation_result_t result), (result))
TWIN(size_t, shaderc_result_get_length, (const shaderc_compilation_result_t result), (result))
TWIN(const char*, shaderc_result_get_bytes, (const shaderc_compilation_result_t result), (result))
TWIN(const char*, shaderc_result_get_error_message, (const shaderc_compilation_result_t result), (result))
TWIN(shaderc_compilation_status, shaderc_result_get_compilation_status, (const shaderc_compilation_result_t result),
     (result))
TWIN_VOID(shaderc_get_spv_version, (unsigned int* version, unsigned int* revision), (version, revision))
