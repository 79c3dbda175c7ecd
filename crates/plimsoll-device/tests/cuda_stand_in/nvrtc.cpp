// libnvrtc of the stand-in: compiles a source with g++ against the fibre shim. The resulting "cubin" contains a shared
// object with a launch_NAME for each kernel.

#include "stand_in.h"

#include <atomic>
#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <regex>
#include <sstream>

#ifndef STAND_IN_SHIM
#error "-DSTAND_IN_SHIM=\"path of shim.h\""
#endif

extern char** environ;

namespace {

constexpr int INVALID_INPUT = 3, INVALID_PROGRAM = 4, INVALID_OPTION = 5, COMPILATION = 6;

struct Program {
    std::string source, name, log, image;
};

std::string contents(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

// Returns the kernels' names; their types determine the launch functions.
std::string launchers(const std::string& source) {
    std::string text =
        "template <class... A> int sizes_of(void (*)(A...), unsigned* out) {\n"
        "    unsigned sizes[] = {(unsigned)sizeof(A)...};\n"
        "    memcpy(out, sizes, sizeof sizes);\n"
        "    return sizeof...(A);\n"
        "}\n";
    static const std::regex kernel("extern \"C\" __global__\\s+void\\s+(?:__launch_bounds__\\([^)]*\\)\\s*)?(\\w+)\\s*\\(");
    for (std::sregex_iterator at(source.begin(), source.end(), kernel), end; at != end; ++at) {
        std::string name = (*at)[1];
        text += "extern \"C\" int launch_" + name +
                "(const unsigned* grid, unsigned block, unsigned shared_bytes, void* const* arguments, int reverse) {\n"
                "    return shim::launch(" + name + ", grid, block, shared_bytes, arguments, reverse);\n}\n"
                "extern \"C\" int sizes_" + name + "(unsigned* out) { return sizes_of(" + name + ", out); }\n";
    }
    return text;
}

// Returns the folder of compiled units: PLIMSOLL_STAND_IN_UNITS, which several stand-ins may share, or one next to this
// library.
std::string folder() {
    std::string folder = stand_in::setting("UNITS", "");
    if (folder.empty()) {
        Dl_info info;
        if (!dladdr((void*)&launchers, &info)) stand_in::die("where is this library?");
        std::string path = info.dli_fname;
        folder = path.substr(0, path.rfind('/')) + "/units";
    }
    mkdir(folder.c_str(), 0777);
    return folder;
}

// Runs g++ with its output in `log`. Returns whether it succeeded.
bool compile(const std::string& from, const std::string& to, std::string& log) {
    std::string said = to + ".log";
    const char* arguments[] = {"g++", "-std=c++17", "-O2", "-march=native", "-ftls-model=local-dynamic", "-mtls-dialect=gnu2",
                               "-fno-strict-aliasing", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-w", "-fPIC", "-shared",
                               "-o", to.c_str(), from.c_str(), nullptr};
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, 2, said.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
    pid_t child;
    int status = 1;
    if (posix_spawnp(&child, "g++", &files, nullptr, (char* const*)arguments, environ) != 0) stand_in::die("no g++");
    waitpid(child, &status, 0);
    posix_spawn_file_actions_destroy(&files);
    log = contents(said);
    unlink(said.c_str());
    return status == 0;
}

struct ImageHeader {
    char magic[16] = "stand-in image\n";
    uint64_t bytes, arch;
};

}  // namespace

EXPORT int nvrtcVersion(int* major, int* minor) {
    *major = 13, *minor = 2;
    return 0;
}

EXPORT const char* nvrtcGetErrorString(int code) {
    switch (code) {
        case 0: return "NVRTC_SUCCESS";
        case INVALID_INPUT: return "NVRTC_ERROR_INVALID_INPUT";
        case INVALID_PROGRAM: return "NVRTC_ERROR_INVALID_PROGRAM";
        case INVALID_OPTION: return "NVRTC_ERROR_INVALID_OPTION";
        case COMPILATION: return "NVRTC_ERROR_COMPILATION";
    }
    return "NVRTC_ERROR";
}

static const int ARCHS[] = {75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121};

EXPORT int nvrtcGetNumSupportedArchs(int* count) {
    *count = sizeof ARCHS / sizeof *ARCHS;
    return 0;
}

EXPORT int nvrtcGetSupportedArchs(int* archs) {
    memcpy(archs, ARCHS, sizeof ARCHS);
    return 0;
}

EXPORT int nvrtcCreateProgram(Program** program, const char* source, const char* name, int headers, const char* const*, const char* const*) {
    // Kernels of this project include no headers.
    if (headers != 0) return INVALID_INPUT;
    *program = new Program{source, name ? name : "unnamed", "", ""};
    return 0;
}

EXPORT int nvrtcDestroyProgram(Program** program) {
    delete *program;
    *program = nullptr;
    return 0;
}

EXPORT int nvrtcCompileProgram(Program* program, int count, const char* const* options) {
    uint64_t arch = 0;
    for (int i = 0; i < count; i++) {
        std::string option = options[i];
        size_t at = option.find("=sm_");
        if (at != std::string::npos) arch = strtoull(option.c_str() + at + 4, nullptr, 10);
        if (option.rfind("-", 0) != 0) return INVALID_OPTION;
    }
    if (arch < 75) {
        program->log = "an architecture of machine code is needed: --gpu-architecture=sm_NN";
        return INVALID_OPTION;
    }
    std::string text = contents(STAND_IN_SHIM) + "\n" + program->source + "\n#line 1 \"launchers\"\n" + launchers(program->source);
    std::string base = folder() + "/" + std::to_string(std::hash<std::string>()(text));
    std::string library = base + ".so", source = base + ".cpp";
    if (contents(source) != text || access(library.c_str(), R_OK) != 0) {
        // Several processes and threads may compile the same unit.
        static std::atomic<unsigned> number;
        std::string mine = base + "." + std::to_string(getpid()) + "." + std::to_string(number++);
        std::ofstream(mine + ".cpp", std::ios::binary) << text;
        bool compiled = compile(mine + ".cpp", mine + ".so", program->log);
        if (!compiled) {
            unlink((mine + ".cpp").c_str());
            return COMPILATION;
        }
        rename((mine + ".so").c_str(), library.c_str());
        rename((mine + ".cpp").c_str(), source.c_str());
    }
    std::string object = contents(library);
    ImageHeader header;
    header.bytes = object.size(), header.arch = arch;
    program->image = std::string((const char*)&header, sizeof header) + object;
    return 0;
}

EXPORT int nvrtcGetProgramLogSize(Program* program, size_t* size) {
    *size = program->log.size() + 1;
    return 0;
}

EXPORT int nvrtcGetProgramLog(Program* program, char* log) {
    memcpy(log, program->log.c_str(), program->log.size() + 1);
    return 0;
}

EXPORT int nvrtcGetCUBINSize(Program* program, size_t* size) {
    if (program->image.empty()) return INVALID_PROGRAM;
    *size = program->image.size();
    return 0;
}

EXPORT int nvrtcGetCUBIN(Program* program, char* image) {
    memcpy(image, program->image.data(), program->image.size());
    return 0;
}
