// The models of the NVML stub, the choice among them, and the processes on each card.

#include "cards.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Bits of nvmlClocksEventReasons.
enum { GPU_IDLE = 0x1, SW_POWER_CAP = 0x4 };

static const struct Model MODELS[] = {
    {
        .key = "rtx3090", .name = "NVIDIA GeForce RTX 3090",
        .compute_major = 8, .compute_minor = 6, .multiprocessors = 82,
        .total_mib = 24576, .reserved_mib = 316, .cuda_mib = 24260,
        .has_memory = true, .has_process_memory = true, .has_process_names = true,
        .celsius = 41, .slowdown_celsius = 95,
        .milliwatts = 28570, .milliwatts_set = 350000, .milliwatts_default = 350000,
        .clock_mhz = 210, .clock_mhz_max = 2100, .memory_clock_mhz = 405,
        .busy_percent = 3, .throttle_bits = GPU_IDLE,
        .generation_max = 4, .lanes_max = 16, .generation = 1, .lanes = 16, .drives_display = 1,
        .processes = "1811 384 G /usr/lib/xorg/Xorg\n4711 6144 C /usr/bin/python3 train.py\n",
    },
    {
        .key = "rtx3070", .name = "NVIDIA GeForce RTX 3070",
        .compute_major = 8, .compute_minor = 6, .multiprocessors = 46,
        .total_mib = 8192, .reserved_mib = 212, .cuda_mib = 7980,
        .has_memory = true, .has_process_memory = true, .has_process_names = true,
        .celsius = 78, .slowdown_celsius = 98,
        .milliwatts = 149870, .milliwatts_set = 150000, .milliwatts_default = 220000,
        .clock_mhz = 1290, .clock_mhz_max = 2100, .memory_clock_mhz = 7001,
        .busy_percent = 97, .throttle_bits = SW_POWER_CAP,
        .generation_max = 3, .lanes_max = 16, .generation = 3, .lanes = 8, .drives_display = 0,
        .processes = "5120 2048 C+G /usr/bin/blender\n",
    },
    {
        .key = "h200", .name = "NVIDIA H200",
        .compute_major = 9, .compute_minor = 0, .multiprocessors = 132,
        .total_mib = 143771, .reserved_mib = 615, .cuda_mib = 143156,
        .has_memory = true, .has_process_memory = true, .has_process_names = true,
        .celsius = 33, .slowdown_celsius = 87,
        .milliwatts = 76210, .milliwatts_set = 700000, .milliwatts_default = 700000,
        .clock_mhz = 345, .clock_mhz_max = 1980, .memory_clock_mhz = 3201,
        .busy_percent = 0, .throttle_bits = GPU_IDLE,
        .generation_max = 5, .lanes_max = 16, .generation = 5, .lanes = 16, .drives_display = 0,
        .processes = "",
    },
    {
        .key = "h200-mig", .name = "NVIDIA H200 MIG 1g.18gb", .is_mig = true,
        .compute_major = 9, .compute_minor = 0, .multiprocessors = 16,
        .total_mib = 16384, .reserved_mib = 64, .cuda_mib = 16320,
        .has_memory = true, .has_process_memory = true, .has_process_names = true,
        .celsius = NOT_REPORTED, .slowdown_celsius = NOT_REPORTED,
        .milliwatts = NOT_REPORTED, .milliwatts_set = NOT_REPORTED, .milliwatts_default = NOT_REPORTED,
        .clock_mhz = NOT_REPORTED, .clock_mhz_max = NOT_REPORTED, .memory_clock_mhz = NOT_REPORTED,
        .busy_percent = NOT_REPORTED, .throttle_bits = NOT_REPORTED,
        .generation_max = NOT_REPORTED, .lanes_max = NOT_REPORTED, .generation = NOT_REPORTED, .lanes = NOT_REPORTED,
        .drives_display = NOT_REPORTED,
        .processes = "6001 4096 C python3\n",
    },
    {
        .key = "wsl", .name = "NVIDIA GeForce RTX 3090",
        .compute_major = 8, .compute_minor = 6, .multiprocessors = 82,
        .total_mib = 24576, .reserved_mib = 316, .cuda_mib = 24260,
        .has_memory = true, .has_process_memory = false, .has_process_names = false,
        .celsius = 52, .slowdown_celsius = NOT_REPORTED,
        .milliwatts = NOT_REPORTED, .milliwatts_set = NOT_REPORTED, .milliwatts_default = NOT_REPORTED,
        .clock_mhz = NOT_REPORTED, .clock_mhz_max = NOT_REPORTED, .memory_clock_mhz = NOT_REPORTED,
        .busy_percent = NOT_REPORTED, .throttle_bits = NOT_REPORTED,
        .generation_max = NOT_REPORTED, .lanes_max = NOT_REPORTED, .generation = NOT_REPORTED, .lanes = NOT_REPORTED,
        .drives_display = 1,
        .processes = "38 1536 C -\n",
    },
    {
        .key = "gb10", .name = "NVIDIA GB10",
        .compute_major = 12, .compute_minor = 1, .multiprocessors = 48,
        .total_mib = 0, .reserved_mib = 0, .cuda_mib = 122572,
        .has_memory = false, .has_process_memory = true, .has_process_names = true,
        .celsius = 44, .slowdown_celsius = NOT_REPORTED,
        .milliwatts = 11800, .milliwatts_set = NOT_REPORTED, .milliwatts_default = NOT_REPORTED,
        .clock_mhz = 208, .clock_mhz_max = 3003, .memory_clock_mhz = NOT_REPORTED,
        .busy_percent = 0, .throttle_bits = GPU_IDLE,
        .generation_max = 5, .lanes_max = 16, .generation = 1, .lanes = 16, .drives_display = 0,
        .processes = "7007 900 C python3\n",
    },
};

static struct Card cards[MAX_CARDS], whole_gpus[MAX_CARDS];
static int count = -1;

static const struct Model *model(const char *key) {
    for (unsigned i = 0; i < sizeof MODELS / sizeof *MODELS; i++)
        if (strcmp(MODELS[i].key, key) == 0) return &MODELS[i];
    fprintf(stderr, "NVML stub: there is no card `%s`\n", key);
    abort();
}

static void choose(void) {
    if (count >= 0) return;
    const char *keys = getenv("PLIMSOLL_NVML_STUB");
    char text[512];
    snprintf(text, sizeof text, "%s", keys && *keys ? keys : "rtx3090");
    count = 0;
    for (char *key = strtok(text, ","); key && count < MAX_CARDS; key = strtok(NULL, ",")) {
        struct Card *new = &cards[count];
        *new = (struct Card){model(key), count, NULL};
        if (new->model->is_mig) {
            whole_gpus[count] = (struct Card){model("h200"), count, NULL};
            new->whole = &whole_gpus[count];
        }
        count++;
    }
}

int card_count(void) {
    choose();
    return count;
}

struct Card *card(int number) {
    choose();
    return &cards[number];
}

void uuid_of(const struct Card *card, unsigned char uuid[16]) {
    memset(uuid, 0, 16);
    uuid[0] = card->model->is_mig ? 0xa1 : 0xa0;
    uuid[15] = (unsigned char)card->number;
}

// Parses a line after the number of the card. Returns whether it describes a process.
static bool parse(const char *line, struct Process *process) {
    char mib[16], kind[8];
    int name = 0;
    if (sscanf(line, "%u %15s %7s %n", &process->pid, mib, kind, &name) != 3 || name == 0) return false;
    process->mib = mib[0] == '?' ? -1 : strtol(mib, NULL, 10);
    process->computes = strchr(kind, 'C') != NULL;
    process->draws = strchr(kind, 'G') != NULL;
    snprintf(process->name, sizeof process->name, "%.*s", (int)strcspn(line + name, "\n"), line + name);
    return true;
}

// Reads the process file, from which another process may remove it at any time.
static int read_file(const char *path, int number, struct Process list[MAX_PROCESSES]) {
    FILE *file = fopen(path, "r");
    char line[MAX_NAME + 64];
    int found = 0;
    while (file && found < MAX_PROCESSES && fgets(line, sizeof line, file)) {
        char *rest;
        if (strtol(line, &rest, 10) == number && rest != line) found += parse(rest, &list[found]);
    }
    if (file) fclose(file);
    return found;
}

int processes_on(const struct Card *card, struct Process list[MAX_PROCESSES]) {
    const char *path = getenv("PLIMSOLL_NVML_STUB_PROCESSES");
    if (path && *path) return read_file(path, card->number, list);
    int found = 0;
    for (const char *line = card->model->processes; *line; line = strchr(line, '\n') + 1)
        found += parse(line, &list[found]);
    return found;
}
