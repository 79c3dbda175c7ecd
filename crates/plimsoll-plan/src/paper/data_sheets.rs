//! The data sheets of GPUs that are planned for on paper. `docs/plans.md` names the sources of the figures.

/// The data sheet of a GPU. Rates are those of its maker: f32 without tensor cores, dense bf16 with f32 accumulation.
pub(super) struct DataSheet {
    pub name: &'static str,
    /// Total memory reported by the driver in GiB; assumed except for the 3070, 3090, 5090 and H200.
    pub usable_gib: f64,
    pub f32_tflops: f64,
    pub bf16_tflops: f64,
    pub memory_gb_per_second: f64,
    pub pcie_generation: u32,
    pub pcie_lanes: u32,
    /// Rate of the direct link between two such GPUs in GB/s, one way; 0 if they exchange through the host.
    pub nvlink_gb_per_second: f64,
}

/// The columns of a row: GiB, [TFLOPS in f32, in bf16], GB/s of the memory, [PCIe generation, lanes], GB/s of NVLink.
const fn sheet(
    name: &'static str,
    usable_gib: f64,
    [f32_tflops, bf16_tflops]: [f64; 2],
    memory_gb_per_second: f64,
    [pcie_generation, pcie_lanes]: [u32; 2],
    nvlink_gb_per_second: f64,
) -> DataSheet {
    DataSheet {
        name,
        usable_gib,
        f32_tflops,
        bf16_tflops,
        memory_gb_per_second,
        pcie_generation,
        pcie_lanes,
        nvlink_gb_per_second,
    }
}

#[rustfmt::skip]
pub(super) const DATA_SHEETS: [DataSheet; 40] = [
    sheet("rtx3060",           11.6,  [12.7, 25.5],   360.0,  [4, 16], 0.0),
    sheet("rtx3060ti",         7.67,  [16.2, 32.4],   448.0,  [4, 16], 0.0),
    sheet("rtx3070",           7.67,  [20.3, 40.6],   448.0,  [4, 16], 0.0),
    sheet("rtx3070ti",         7.67,  [21.7, 43.5],   608.0,  [4, 16], 0.0),
    sheet("rtx3080",           9.6,   [29.8, 59.5],   760.0,  [4, 16], 0.0),
    sheet("rtx3080-12g",       11.6,  [30.6, 61.3],   912.0,  [4, 16], 0.0),
    sheet("rtx3080ti",         11.6,  [34.1, 68.2],   912.0,  [4, 16], 0.0),
    sheet("rtx3090",           23.57, [35.6, 71.0],   936.0,  [4, 16], 0.0),
    sheet("rtx3090ti",         23.57, [40.0, 80.0],   1008.0, [4, 16], 0.0),
    sheet("rtx4060",           7.67,  [15.1, 30.2],   272.0,  [4, 8],  0.0),
    sheet("rtx4060ti",         7.67,  [22.1, 44.1],   288.0,  [4, 8],  0.0),
    sheet("rtx4060ti-16g",     15.6,  [22.1, 44.1],   288.0,  [4, 8],  0.0),
    sheet("rtx4070",           11.6,  [29.1, 58.3],   504.2,  [4, 16], 0.0),
    sheet("rtx4070-super",     11.6,  [35.5, 71.0],   504.2,  [4, 16], 0.0),
    sheet("rtx4070ti",         11.6,  [40.1, 80.2],   504.2,  [4, 16], 0.0),
    sheet("rtx4070ti-super",   15.6,  [44.1, 88.2],   672.3,  [4, 16], 0.0),
    sheet("rtx4080",           15.6,  [48.7, 97.5],   716.8,  [4, 16], 0.0),
    sheet("rtx4080-super",     15.6,  [52.2, 104.4],  736.3,  [4, 16], 0.0),
    sheet("rtx4090",           23.6,  [82.6, 165.2],  1008.0, [4, 16], 0.0),
    sheet("rtx5060ti-16g",     15.6,  [23.7, 47.4],   448.0,  [5, 8],  0.0),
    sheet("rtx5070",           11.6,  [30.9, 61.7],   672.0,  [5, 16], 0.0),
    sheet("rtx5070ti",         15.6,  [43.9, 87.9],   896.0,  [5, 16], 0.0),
    sheet("rtx5080",           15.6,  [56.3, 112.6],  960.0,  [5, 16], 0.0),
    sheet("rtx5090",           31.36, [104.8, 209.5], 1792.0, [5, 16], 0.0),
    sheet("rtx-a6000",         47.4,  [38.7, 154.8],  768.0,  [4, 16], 56.25),
    sheet("rtx6000-ada",       47.4,  [91.1, 364.2],  960.0,  [4, 16], 0.0),
    sheet("rtx-pro-6000",      94.9,  [125.0, 503.8], 1792.0, [5, 16], 0.0),
    sheet("a10",               22.4,  [31.2, 125.0],  600.0,  [4, 16], 0.0),
    sheet("a30",               23.5,  [10.3, 165.0],  933.0,  [4, 16], 100.0),
    sheet("a40",               44.9,  [37.4, 149.7],  696.0,  [4, 16], 56.25),
    sheet("l4",                22.4,  [30.3, 121.0],  300.0,  [4, 16], 0.0),
    sheet("l40",               44.9,  [90.5, 181.0],  864.0,  [4, 16], 0.0),
    sheet("l40s",              44.9,  [91.6, 362.0],  864.0,  [4, 16], 0.0),
    sheet("a100-40g",          39.4,  [19.5, 312.0],  1555.0, [4, 16], 300.0),
    sheet("a100-80g",          79.2,  [19.5, 312.0],  2039.0, [4, 16], 300.0),
    sheet("h100-pcie",         79.2,  [51.0, 756.0],  2000.0, [5, 16], 300.0),
    sheet("h100-nvl",          93.5,  [60.0, 835.0],  3900.0, [5, 16], 300.0),
    sheet("h100-sxm",          79.2,  [67.0, 989.0],  3350.0, [5, 16], 450.0),
    sheet("h200",              140.4, [67.0, 989.0],  4800.0, [5, 16], 450.0),
    sheet("b200",              178.0, [75.0, 2250.0], 7700.0, [5, 16], 900.0),
];
