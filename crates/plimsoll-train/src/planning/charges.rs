//! The charge model: what a device is charged with in addition to its process, and which charges a plan starts from.
//!
//! | charge | function | known |
//! |---|---|---|
//! | the process | `resolve::charges::set_process_charges` | once model and data are open |
//! | work in a team | [`add_team_charges`] | before the plan |
//! | a previous plan | [`adopt_previous_charges`] | before the plan |
//! | Programs | [`ProgramCharges`] | with the plan |
//! | a GPU | `measure_gpu_charges` | with the plan |
//!
//! [`Planner`](super::planner::Planner) repeats a plan until the last two agree with it.

use super::previous_plan::PreviousPlan;
use crate::data::Rows;
use crate::resolve::RunRequest;
use crate::resolve::charges::{NEAR_FIT_BYTES, RESIDENT_VARIATION_BYTES, process_charges_minus, round_up_charges};
use plimsoll_core::{Bytes, DeviceKind, DeviceSpec};
use plimsoll_device::transport::wire;
use plimsoll_plan::team::{PlannedWorker, TeamOutcome};
use plimsoll_program::ProgramSet;

/// Adds the charges (bytes outside the arena) of work in a team. Each CPU or virtual device in this process is charged
/// with a copy of the step's rows. If any device of the team is remote, all devices except GPUs, present or on paper, are
/// also charged with the bytes in flight over connections.
pub(crate) fn add_team_charges(devices: &mut [DeviceSpec], run: &RunRequest) {
    let rows = Rows::max_bytes(run.batch_sequences(), u64::from(run.data.sequence));
    let any_remote = devices.iter().any(|device| device.remote_host().is_some());
    for device in devices {
        if device.in_process() {
            device.charges = round_up_charges(device.charges + rows);
        }
        if any_remote && !matches!(device.kind, DeviceKind::Cuda | DeviceKind::Paper) {
            device.charges = round_up_charges(device.charges + wire::MAX_IN_FLIGHT_BYTES);
        }
    }
}

/// Replaces the charges (bytes outside the arena) of `devices` by those of a previous plan. A resumed run then gets the
/// same plan. A device keeps charges that exceed the previous ones by more than [`RESIDENT_VARIATION_BYTES`].
/// Without a previous plan (`None`) all charges stay. Returns the devices to whose charges the bytes of the Programs must
/// still be added.
///
/// In a team, only CPU and virtual devices in this process take over charges. For a single device, a GPU that this
/// machine has not measured takes them over too.
pub(crate) fn adopt_previous_charges(devices: &mut [DeviceSpec], previous: Option<&PreviousPlan>) -> ProgramCharging {
    let Some(charges) = previous.map(|previous| previous.charges_bytes) else { return ProgramCharging::All };
    let is_enough = |device: &DeviceSpec| device.charges <= charges + RESIDENT_VARIATION_BYTES;
    let [device] = devices else {
        let enough = devices.iter_mut().filter(|device| device.in_process() && is_enough(device));
        enough.for_each(|device| device.charges = charges);
        return ProgramCharging::Covered;
    };
    let is_unmeasured_gpu = device.kind == DeviceKind::Cuda && !device.charges_measured;
    if !is_unmeasured_gpu && !is_enough(device) {
        return ProgramCharging::All;
    }
    device.charges = charges;
    device.charges_measured |= is_unmeasured_gpu;
    ProgramCharging::Covered
}

/// Returns charges (bytes outside the arena) slightly below those that this process has now. If no plan fits with the
/// measured charges, planning is tried once more with these.
pub(crate) fn near_fit_charges(run: &RunRequest) -> Bytes {
    process_charges_minus(NEAR_FIT_BYTES, run.buffered_sequences(), u64::from(run.data.sequence))
}

/// Returns the bytes that Programs take in the memory of a process, beyond what every process is charged with. `sets`
/// are the Programs of all devices of the process. The first 1024 ops are free. Each further one counts 1152 bytes, a
/// measured figure for the op, its tensors and their names. The result is rounded up to whole MiB.
pub(crate) fn program_heap_bytes<'a>(sets: impl IntoIterator<Item = &'a ProgramSet>) -> Bytes {
    heap_bytes_of_ops(op_count(sets))
}

/// Returns the number of ops in all Programs of some sets.
fn op_count<'a>(sets: impl IntoIterator<Item = &'a ProgramSet>) -> u64 {
    let blocks = sets.into_iter().flat_map(|set| &set.programs).flat_map(|program| &program.blocks);
    blocks.map(|block| block.ops.len() as u64).sum()
}

/// Returns the result of [`program_heap_bytes`] for Programs of `ops` ops.
fn heap_bytes_of_ops(ops: u64) -> Bytes {
    const FREE_OPS: u64 = 1024;
    const OP_BYTES: u64 = 1152;
    Bytes((ops.saturating_sub(FREE_OPS) * OP_BYTES).next_multiple_of(Bytes::mib(1).0))
}

/// Returns the part of a device's charges (bytes outside the arena) that its Programs cause. Returns zero for a GPU,
/// because the charges of a GPU are measured with its Programs.
pub(crate) fn program_charges(device: &DeviceSpec, set: &ProgramSet) -> Bytes {
    if device.kind == DeviceKind::Cuda { Bytes::ZERO } else { program_heap_bytes([set]) }
}

/// Returns the workers of a team's plan, followed by its evaluator if it has one.
pub(crate) fn planned_workers(outcome: &TeamOutcome) -> impl Iterator<Item = &PlannedWorker> {
    outcome.workers.iter().chain(&outcome.evaluator)
}

/// The choice of devices that are charged with the bytes that the Programs of a plan take in this process. GPUs are
/// never charged: their charges are measured with their Programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProgramCharging {
    /// All CPU and virtual devices. Each is charged with the Programs of the whole team, which lie in one process.
    All,
    /// Only the device with this index, and only for plans in which it does all work.
    Alone(usize),
    /// No device, because the charges cover the Programs already.
    Covered,
}

impl ProgramCharging {
    /// Whether the Programs of `outcome` are to be charged to the chosen devices. This holds for a refused plan, too, so
    /// that its remedies have room for Programs.
    pub fn applies_to(self, outcome: &TeamOutcome) -> bool {
        match self {
            ProgramCharging::All => true,
            ProgramCharging::Alone(number) => matches!(&outcome.workers[..], [worker] if worker.device == number),
            ProgramCharging::Covered => false,
        }
    }

    /// Whether `device`, which has the index `number`, is charged with Programs. Only CPU and virtual devices are; the
    /// charges of a GPU are measured with its Programs.
    fn charges(self, number: usize, device: &DeviceSpec) -> bool {
        let is_included = match self {
            ProgramCharging::All => true,
            ProgramCharging::Alone(only) => only == number,
            ProgramCharging::Covered => false,
        };
        is_included && matches!(device.kind, DeviceKind::Cpu | DeviceKind::Virtual)
    }
}

/// Charges for the Programs of a plan. Planning is repeated until they cover the Programs of its result.
pub(crate) struct ProgramCharges {
    charging: ProgramCharging,
    /// Charges (bytes outside the arena) of each device without those for Programs.
    base: Vec<Bytes>,
    charged: Bytes,
    /// Names of the devices that are charged.
    names: Vec<String>,
}

impl ProgramCharges {
    /// Creates the state before the first plan. The present charges of `devices` count as those without Programs.
    pub fn new(devices: &[DeviceSpec], charging: ProgramCharging) -> ProgramCharges {
        let base = devices.iter().map(|device| device.charges).collect();
        let charged = devices.iter().enumerate().filter(|(number, device)| charging.charges(*number, device));
        let names = charged.map(|(_, device)| device.name.clone()).collect();
        ProgramCharges { charging, base, charged: Bytes::ZERO, names }
    }

    /// Raises the charges of `devices` to cover the Programs of `outcome`, and returns true. A new plan is then needed.
    /// Returns false, and changes nothing, if the charges cover the Programs already or no device is charged with them.
    pub fn raise(&mut self, devices: &mut [DeviceSpec], outcome: &TeamOutcome) -> bool {
        if !self.charging.applies_to(outcome) {
            return false;
        }
        let ops = op_count(planned_workers(outcome).map(|worker| &worker.outcome.set));
        // The remedies of a refusal offload more, and so have up to twice the ops.
        let most_ops = if outcome.plan.fits { ops } else { 2 * ops };
        self.raise_to(devices, heap_bytes_of_ops(most_ops))
    }

    /// Returns the charges that the Programs of the refused `outcome` do not need: its remedies may need them.
    pub fn spare(&self, outcome: &TeamOutcome) -> Bytes {
        let ops = op_count(planned_workers(outcome).map(|worker| &worker.outcome.set));
        self.charged.saturating_sub(heap_bytes_of_ops(ops))
    }

    /// Returns whether a device is charged with Programs.
    pub fn is_charged(&self, device: &str) -> bool {
        self.charged > Bytes::ZERO && self.names.iter().any(|name| name == device)
    }

    /// Raises the charges of `devices` to cover Programs of `program_bytes` bytes. Returns whether it raised any, see
    /// [`ProgramCharges::raise`].
    fn raise_to(&mut self, devices: &mut [DeviceSpec], program_bytes: Bytes) -> bool {
        let charging = self.charging;
        let is_charged = |(number, device): &(usize, &mut DeviceSpec)| charging.charges(*number, device);
        if program_bytes <= self.charged {
            return false;
        }
        let mut has_raised = false;
        for (number, device) in devices.iter_mut().enumerate().filter(is_charged) {
            device.charges = self.base[number] + program_bytes;
            has_raised = true;
        }
        self.charged = if has_raised { program_bytes } else { self.charged };
        has_raised
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planning::testing::device;
    use plimsoll_core::Recipe;

    /// Returns devices of these kinds with these charges in MiB, which count as assumed.
    fn devices(list: &[(DeviceKind, u64)]) -> Vec<DeviceSpec> {
        let device = |(number, &(kind, mib)): (usize, &(DeviceKind, u64))| DeviceSpec {
            charges: Bytes::mib(mib),
            charges_measured: false,
            ..device(&format!("device{number}"), kind)
        };
        list.iter().enumerate().map(device).collect()
    }

    fn charges_mib(devices: &[DeviceSpec]) -> Vec<u64> {
        devices.iter().map(|device| device.charges.0 >> 20).collect()
    }

    #[test]
    fn sufficient_previous_charges_are_adopted() {
        use DeviceKind::{Cpu, Cuda, Paper, Virtual};
        let previous = PreviousPlan {
            recipe: Recipe::on_device(1, vec![]),
            charges_bytes: Bytes::mib(40),
            algorithms: None,
            parallelism: None,
            team: vec![],
        };
        // Each devices with their charges in MiB, the charges after adoption, and the charging that follows.
        type Adoption = (&'static [(DeviceKind, u64)], &'static [u64], ProgramCharging);
        let cases: &[Adoption] = &[
            (&[(Cpu, 24)], &[40], ProgramCharging::Covered),
            (&[(Virtual, 42)], &[40], ProgramCharging::Covered),
            (&[(Cpu, 43)], &[43], ProgramCharging::All),
            (&[(Paper, 544)], &[544], ProgramCharging::All),
            // This machine has not measured the GPU, and the run has.
            (&[(Cuda, 544)], &[40], ProgramCharging::Covered),
            // GPUs of a team are measured again.
            (&[(Cpu, 24), (Cuda, 544)], &[40, 544], ProgramCharging::Covered),
            (&[(Cpu, 60), (Virtual, 24)], &[60, 40], ProgramCharging::Covered),
        ];
        for (list, expected, charging) in cases {
            let mut adopted = devices(list);
            assert_eq!(adopt_previous_charges(&mut adopted, Some(&previous)), *charging, "{list:?}");
            assert_eq!(charges_mib(&adopted), *expected, "{list:?}");
            let mut kept = devices(list);
            assert_eq!(adopt_previous_charges(&mut kept, None), ProgramCharging::All, "{list:?}");
            assert_eq!(kept, devices(list));
        }
        let mut measured = devices(&[(Cuda, 544)]);
        measured[0].charges_measured = true;
        assert_eq!(adopt_previous_charges(&mut measured, Some(&previous)), ProgramCharging::All);
        assert_eq!(charges_mib(&measured), [544]);
    }

    #[test]
    fn program_charges_grow_on_processors_only() {
        use DeviceKind::{Cpu, Cuda, Virtual};
        let list = [(Cpu, 20), (Cuda, 500), (Virtual, 30)];
        // Each request for MiB of Programs, whether it raises the charges, and the charges after it.
        type Raise = (u64, bool, [u64; 3]);
        let cases: [(ProgramCharging, [Raise; 4]); 4] = [
            (
                ProgramCharging::All,
                [
                    (0, false, [20, 500, 30]),
                    (8, true, [28, 500, 38]),
                    (8, false, [28, 500, 38]),
                    (12, true, [32, 500, 42]),
                ],
            ),
            (
                ProgramCharging::Alone(2),
                [
                    (8, true, [20, 500, 38]),
                    (4, false, [20, 500, 38]),
                    (8, false, [20, 500, 38]),
                    (12, true, [20, 500, 42]),
                ],
            ),
            (ProgramCharging::Alone(1), [(4, false, [20, 500, 30]); 4]),
            (ProgramCharging::Covered, [(4, false, [20, 500, 30]); 4]),
        ];
        for (charging, raises) in cases {
            let mut charged = devices(&list);
            let mut programs = ProgramCharges::new(&charged, charging);
            for (mib, raised, expected) in raises {
                assert_eq!(programs.raise_to(&mut charged, Bytes::mib(mib)), raised, "{charging:?}: {mib} MiB");
                assert_eq!(charges_mib(&charged), expected, "{charging:?}: {mib} MiB");
            }
        }
    }

    #[test]
    fn team_charges_cover_rows_and_wires() {
        use DeviceKind::{Cpu, Cuda};
        let run = crate::resolve::tests::run_request(&["model.preset=smollm2-135m"]);
        let wires = wire::MAX_IN_FLIGHT_BYTES;
        let rows = Rows::max_bytes(run.batch_sequences(), u64::from(run.data.sequence));
        let mut local = devices(&[(Cpu, 20), (Cuda, 500)]);
        add_team_charges(&mut local, &run);
        let with_rows = round_up_charges(Bytes::mib(20) + rows);
        assert_eq!([local[0].charges, local[1].charges], [with_rows, Bytes::mib(500)]);
        let mut mixed = devices(&[(Cpu, 20), (Cpu, 20), (Cuda, 500)]);
        mixed[1].name = "host1/cpu".to_owned();
        add_team_charges(&mut mixed, &run);
        let expected = [with_rows + wires, Bytes::mib(20) + wires, Bytes::mib(500)].map(round_up_charges);
        assert_eq!(mixed.iter().map(|device| device.charges).collect::<Vec<_>>(), expected);
    }
}
