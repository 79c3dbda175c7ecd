// libnccl of the stand-in: ranks in one process or several find each other in a folder, and exchange bytes through its
// files. Messages of a group start together; a group is complete when its bytes were received. Calls are non-blocking.

#include "stand_in.h"

#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <set>

using namespace stand_in;

namespace {

// ncclResult_t.
constexpr int SUCCESS = 0, CUDA_ERROR = 1, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, IN_PROGRESS = 7;
constexpr int VERSION = 22809;

struct Id {
    char internal[128];
};

struct Config {
    size_t size;
    unsigned magic, version;
    int blocking;
};

struct Comm;

struct Message {
    bool sends;
    Address at;
    size_t bytes;
    int peer;
    std::shared_ptr<Comm> comm;
    void* stream;
};

struct Comm {
    std::string folder;
    int rank, ranks;
    Gpu* gpu;
    uint64_t charged;
    bool whole = false, aborted = false;
    int failed = SUCCESS;
    uint64_t groups = 0;
    std::vector<Message> pending;  // of the last group; they start when its status is queried
    std::map<std::pair<int, int>, uint64_t> numbers;  // of messages, by both ends
};

// Objects of callers' handles; the queues hold the rest.
struct Handle {
    std::shared_ptr<Comm> comm;
};

thread_local int depth = 0;
thread_local std::vector<Message> group;

bool exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

int present(const Comm& comm) {
    int count = 0;
    for (int rank = 0; rank < comm.ranks; rank++) count += exists(comm.folder + "/rank-" + std::to_string(rank));
    return count;
}

std::string path(Comm& comm, int from, int to) {
    uint64_t number = comm.numbers[{from, to}]++;
    return comm.folder + "/" + std::to_string(from) + "-" + std::to_string(to) + "-" + std::to_string(number);
}

void write_file(const std::string& path, Address from, size_t bytes) {
    std::ofstream file(path + ".part", std::ios::binary);
    file.write((const char*)from, bytes);
    file.close();
    if (!file || rename((path + ".part").c_str(), path.c_str())) die("no room for an NCCL message");
}

void take_file(const std::string& path, Address to, size_t bytes) {
    std::ifstream file(path, std::ios::binary);
    std::vector<char> found((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    if (found.size() != bytes) die("both ends of an NCCL message must have equal length");
    memcpy((void*)to, found.data(), bytes);
    unlink(path.c_str());
}

// Whether the group with this number is to hang, as a file requests; the file is then removed.
bool is_to_stall(uint64_t group) {
    std::string path = setting("NCCL_STALLS", "");
    uint64_t number = 0;
    return !path.empty() && std::ifstream(path) >> number && number == group && unlink(path.c_str()) == 0;
}

// Appends the messages of one communicator to a stream.
int start(std::vector<Message> messages) {
    std::shared_ptr<Comm> comm = messages[0].comm;
    void* stream = messages[0].stream;
    bool stalls = is_to_stall(++comm->groups);
    std::vector<std::string> paths, sent, received;
    for (const Message& message : messages) {
        int from = message.sends ? comm->rank : message.peer, to = message.sends ? message.peer : comm->rank;
        paths.push_back(path(*comm, from, to));
        (message.sends ? sent : received).push_back(paths.back());
    }
    auto sends = [=] {
        for (size_t i = 0; i < messages.size() && !comm->aborted && !stalls; i++)
            if (messages[i].sends) {
                // Corrupts the last byte if requested.
                if (setting("NCCL_CORRUPTS", "0") == "1") ((uint8_t*)messages[i].at)[messages[i].bytes - 1] ^= 1;
                write_file(paths[i], messages[i].at, messages[i].bytes);
            }
    };
    auto receives = [=] {
        for (size_t i = 0; i < messages.size() && !comm->aborted; i++)
            if (!messages[i].sends) take_file(paths[i], messages[i].at, messages[i].bytes);
    };
    auto came = [=] { return comm->aborted || (!stalls && std::all_of(received.begin(), received.end(), exists)); };
    auto taken = [=] { return comm->aborted || (!stalls && std::none_of(sent.begin(), sent.end(), exists)); };
    if (enqueue(stream, "what NCCL sends", sends) || enqueue_when(stream, "what NCCL receives", came, receives) ||
        enqueue_when(stream, "what NCCL has sent", taken, [] {}))
        return CUDA_ERROR;
    return SUCCESS;
}

int end_group() {
    std::vector<Message> all = std::move(group);
    group.clear();
    while (!all.empty()) {
        auto alike = [&](const Message& message) { return message.comm == all[0].comm && message.stream == all[0].stream; };
        std::vector<Message> these;
        std::copy_if(all.begin(), all.end(), std::back_inserter(these), alike);
        Message first = all[0];
        all.erase(std::remove_if(all.begin(), all.end(), [&](const Message& m) { return m.comm == first.comm && m.stream == first.stream; }),
                  all.end());
        if (!first.comm->pending.empty()) die("an NCCL group was queued before the previous group started");
        first.comm->pending = these;
    }
    return IN_PROGRESS;
}

int add(bool sends, Address at, size_t count, int type, int peer, Handle* handle, void* stream) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (!handle || !handle->comm || type != 0 || peer < 0 || peer >= handle->comm->ranks || peer == handle->comm->rank)
        return INVALID_ARGUMENT;
    if (!handle->comm->whole) die("NCCL is used before all ranks have joined");
    if (!current() || current()->gpu != handle->comm->gpu) return INVALID_USAGE;
    group.push_back({sends, at, count, peer, handle->comm, stream});
    return depth == 0 ? end_group() : SUCCESS;
}

}  // namespace

EXPORT int ncclGetVersion(int* version) {
    *version = atoi(setting("NCCL", std::to_string(VERSION).c_str()).c_str());
    return SUCCESS;
}

EXPORT const char* ncclGetErrorString(int status) { return status == SUCCESS ? "no error" : status == SYSTEM_ERROR ? "unhandled system error" : "an error"; }
EXPORT const char* ncclGetLastError(Handle*) { return NAME; }

EXPORT int ncclGetUniqueId(Id* id) {
    std::random_device device;
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "%08x%08x", device(), device());
    return SUCCESS;
}

EXPORT int ncclCommInitRankConfig(Handle** handle, int ranks, Id id, int rank, Config* config) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (config->magic != 0xcafebeef || config->size < sizeof(Config) || config->blocking != 0) return INVALID_ARGUMENT;
    if (!current()) return INVALID_USAGE;
    if (setting("NCCL_REFUSES", "") == std::to_string(rank)) return SYSTEM_ERROR;
    uint64_t bytes = bytes_of(setting("NCCL_MEMORY", "200MiB"));
    Gpu* gpu = current()->gpu;
    if (!charge(*gpu, bytes)) return CUDA_ERROR;
    std::string folder = setting("NCCL_FOLDER", "/dev/shm") + "/stand-in-nccl-" + id.internal;
    mkdir(folder.c_str(), 0700);
    auto comm = std::make_shared<Comm>(Comm{folder, rank, ranks, gpu, bytes});
    std::ofstream(folder + "/rank-" + std::to_string(rank)) << getpid() << " " << gpu->number << "\n";
    *handle = new Handle{comm};
    return IN_PROGRESS;
}

EXPORT int ncclCommGetAsyncError(Handle* handle, int* status) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    Comm& comm = *handle->comm;
    if (!comm.pending.empty() && !comm.aborted) {
        std::vector<Message> messages = std::move(comm.pending);
        comm.pending.clear();
        if (int code = start(messages)) comm.failed = code;
    }
    *status = comm.failed;
    if (comm.whole) return SUCCESS;
    // The first rank that sees all ranks decides for all of them, because it may leave before another rank looks.
    int verdict = SUCCESS;
    std::string verdict_path = comm.folder + "/verdict";
    if (!(std::ifstream(verdict_path) >> verdict)) {
        if (present(comm) < comm.ranks) {
            *status = IN_PROGRESS;
            return SUCCESS;
        }
        // A GPU may join only once.
        verdict = SUCCESS;
        std::set<std::string> cards;
        for (int rank = 0; rank < comm.ranks; rank++) {
            std::ifstream file(comm.folder + "/rank-" + std::to_string(rank));
            std::string card((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
            if (!cards.insert(card).second) verdict = INVALID_USAGE;
        }
        std::ofstream(verdict_path + ".part") << verdict << "\n";
        rename((verdict_path + ".part").c_str(), verdict_path.c_str());
    }
    comm.whole = true;
    *status = comm.failed = verdict;
    return SUCCESS;
}

EXPORT int ncclCommAbort(Handle* handle) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    Comm& comm = *handle->comm;
    comm.aborted = true;
    comm.pending.clear();
    comm.gpu->charges -= comm.charged;
    // The last rank removes the folder, with all unreceived messages.
    unlink((comm.folder + "/rank-" + std::to_string(comm.rank)).c_str());
    if (present(comm) == 0) {
        if (DIR* files = opendir(comm.folder.c_str())) {
            while (dirent* file = readdir(files)) unlink((comm.folder + "/" + file->d_name).c_str());
            closedir(files);
        }
        rmdir(comm.folder.c_str());
    }
    delete handle;
    return SUCCESS;
}

EXPORT int ncclGroupStart() {
    depth++;
    return SUCCESS;
}

EXPORT int ncclGroupEnd() {
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (depth == 0) return INVALID_USAGE;
    return --depth == 0 ? end_group() : SUCCESS;
}

EXPORT int ncclSend(const void* from, size_t count, int type, int peer, Handle* handle, void* stream) {
    return add(true, (Address)from, count, type, peer, handle, stream);
}

EXPORT int ncclRecv(void* to, size_t count, int type, int peer, Handle* handle, void* stream) {
    return add(false, (Address)to, count, type, peer, handle, stream);
}
