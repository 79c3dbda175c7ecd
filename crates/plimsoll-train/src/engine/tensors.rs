//! The tensors of a `ProgramSet` that the engine writes and reads at run time, by their purpose.

use super::tensor_files::stored_tensors;
use crate::files::StoredTensor;
use plimsoll_core::Category;
use plimsoll_program::scalars::{METRICS, SCALARS};
use plimsoll_program::{Program, ProgramKind, ProgramSet, TensorId};
use std::collections::HashMap;

/// Input tensors of a micro-batch. A field is `None` if the device does not read that tensor: a pipeline stage reads
/// some of them, a storage-only worker none.
pub(super) struct BatchInputs {
    pub(super) tokens: Option<InputTensor>,
    pub(super) labels: Option<InputTensor>,
    pub(super) positions: Option<InputTensor>,
    pub(super) document_start: Option<InputTensor>,
    pub(super) weights: Option<InputTensor>,
}

/// An input tensor with one slot (copy) for each micro-batch that keeps its activations at the same time.
#[derive(Clone, Copy)]
pub(super) struct InputTensor {
    pub(super) tensor: TensorId,
    pub(super) slots: u32,
}

/// Input and output tensors of a forward pass that generates text. In a pipeline, only the first stage has tokens and
/// only the last one has logits. A storage-only worker has neither.
#[derive(Clone, Copy)]
pub(super) struct GenerationTensors {
    pub(super) tokens: Option<TensorId>,
    pub(super) positions: Option<TensorId>,
    /// The rows of the tokens in the key-value caches.
    pub(super) places: Option<TensorId>,
    pub(super) logits: Option<TensorId>,
    /// Number of tokens in one pass.
    pub(super) chunk: usize,
}

/// Input tensors of the Program [`ProgramKind::CopyPrefix`]. A storage-only worker has neither.
#[derive(Clone, Copy)]
pub(super) struct CopyTensors {
    pub(super) from: Option<TensorId>,
    pub(super) to: Option<TensorId>,
    /// Number of tokens that are copied in one call.
    pub(super) rows: usize,
}

/// Tensors and sizes of a `ProgramSet` that the engine needs at run time.
pub(super) struct TensorTable {
    pub(super) scalars: TensorId,
    pub(super) metrics: TensorId,
    pub(super) train: Option<BatchInputs>,
    /// Largest number of micro-batches that keep their activations in the arena at the same time; above 1 only on
    /// pipeline stages.
    pub(super) in_flight: u32,
    /// Inputs of an evaluation, and the output tensor that marks correct predictions. The outer `None` means that the
    /// plan does not evaluate, the inner `None` that this device does not compute the loss.
    pub(super) evaluate: Option<(BatchInputs, Option<TensorId>)>,
    /// Inputs of a score, and the output tensor with log-probabilities. The outer `None` means that the plan computes no
    /// scores, the inner `None` that this device does not compute the loss.
    pub(super) score: Option<(BatchInputs, Option<TensorId>)>,
    /// The same for scores under the initial weights.
    pub(super) reference: Option<(BatchInputs, Option<TensorId>)>,
    pub(super) prefill: Option<GenerationTensors>,
    pub(super) decode: Option<GenerationTensors>,
    /// Places from which and to which tokens are copied within the key-value cache; `None` with a single slot.
    pub(super) copy_prefix: Option<CopyTensors>,
    /// Number of sequences that are generated at once, each with a slot of the key-value cache; 0 without generation.
    pub(super) slots: usize,
    /// Number of tokens that a slot of the key-value cache can hold.
    pub(super) capacity: usize,
    /// Number of ops of each Program.
    pub(super) op_counts: HashMap<ProgramKind, u32>,
    /// Tensors that each Program reads from files or writes to them.
    pub(super) files: HashMap<ProgramKind, Vec<StoredTensor>>,
}

impl TensorTable {
    /// Creates an empty table, for a placeholder device without Programs.
    pub(super) fn none() -> TensorTable {
        TensorTable {
            scalars: TensorId(0),
            metrics: TensorId(0),
            train: None,
            in_flight: 1,
            evaluate: None,
            score: None,
            reference: None,
            prefill: None,
            decode: None,
            copy_prefix: None,
            slots: 0,
            capacity: 0,
            op_counts: HashMap::new(),
            files: HashMap::new(),
        }
    }

    /// Creates the table for `set`: looks up, by name, the tensors that the engine reads and writes.
    pub(super) fn of(set: &ProgramSet) -> TensorTable {
        let train = set.program(ProgramKind::Forward).map(|program| BatchInputs::of(set, program, "train"));
        let with_output = |kind: ProgramKind, output: &str| {
            let program = set.program(kind)?;
            let output = listed_tensor(set, &program.outputs, &format!("{kind}.{output}"));
            Some((BatchInputs::of(set, program, kind.name()), output))
        };
        let decode = GenerationTensors::of(set, ProgramKind::Decode);
        let slots = decode.map_or(0, |decode| decode.chunk);
        let cached = set.find("cache_keys").map_or(0, |keys| set.tensor(keys).shape[0] as usize);
        TensorTable {
            scalars: find_tensor(set, SCALARS),
            metrics: find_tensor(set, METRICS),
            in_flight: count_in_flight(set),
            train,
            evaluate: with_output(ProgramKind::Evaluate, "correct"),
            score: with_output(ProgramKind::Score, "log_probabilities"),
            reference: with_output(ProgramKind::Reference, "log_probabilities"),
            prefill: GenerationTensors::of(set, ProgramKind::Prefill),
            decode,
            copy_prefix: CopyTensors::of(set),
            slots,
            capacity: cached / slots.max(1),
            op_counts: set.programs.iter().map(|program| (program.kind, program.op_count() as u32)).collect(),
            files: set.programs.iter().map(|program| (program.kind, stored_tensors(set, program.kind))).collect(),
        }
    }
}

/// Returns the largest number of micro-batches that keep their activations at the same time. Activations that a backward
/// pass reads have slots for each of them, which are as far apart as the micro-batch's own slots are many.
fn count_in_flight(set: &ProgramSet) -> u32 {
    let ops = set.program(ProgramKind::Backward).into_iter().flat_map(|backward| &backward.blocks);
    let accesses = ops.flat_map(|block| &block.ops).flat_map(|op| op.accesses(&|id| set.tensor(id).elements()));
    let counts = accesses.filter_map(|access| {
        let tensor = set.tensor(access.operand.tensor);
        let own_slots = u32::try_from(access.operand.slot.micro_batch).ok().filter(|slots| *slots > 0)?;
        (tensor.category == Category::Activation).then_some(tensor.slots / own_slots)
    });
    counts.max().unwrap_or(1)
}

impl BatchInputs {
    /// Looks up the input tensors of `program`, by names that begin with `prefix`.
    fn of(set: &ProgramSet, program: &Program, prefix: &str) -> BatchInputs {
        let input = |name: &str| {
            let tensor = listed_tensor(set, &program.inputs, &format!("{prefix}.{name}"))?;
            Some(InputTensor { tensor, slots: set.tensor(tensor).slots })
        };
        BatchInputs {
            tokens: input("tokens"),
            labels: input("labels"),
            positions: input("positions"),
            document_start: input("document_start"),
            weights: input("token_weights"),
        }
    }
}

impl GenerationTensors {
    /// Looks up the tensors of the Program `kind`, which generates text; `None` if `set` has no Program of this kind.
    fn of(set: &ProgramSet, kind: ProgramKind) -> Option<GenerationTensors> {
        set.program(kind).map(|program| GenerationTensors {
            tokens: listed_tensor(set, &program.inputs, &format!("{kind}.tokens")),
            positions: listed_tensor(set, &program.inputs, &format!("{kind}.positions")),
            places: listed_tensor(set, &program.inputs, &format!("{kind}.places")),
            logits: listed_tensor(set, &program.outputs, &format!("{kind}.logits")),
            chunk: set.tensor(find_tensor(set, &format!("{kind}.positions"))).elements() as usize,
        })
    }
}

impl CopyTensors {
    /// Looks up the tensors of the Program [`ProgramKind::CopyPrefix`]; `None` if `set` has none.
    fn of(set: &ProgramSet) -> Option<CopyTensors> {
        let kind = ProgramKind::CopyPrefix;
        set.program(kind).map(|program| CopyTensors {
            from: listed_tensor(set, &program.inputs, &format!("{kind}.from")),
            to: listed_tensor(set, &program.inputs, &format!("{kind}.to")),
            rows: set.tensor(find_tensor(set, &format!("{kind}.to"))).elements() as usize,
        })
    }
}

/// Returns the tensor of this name, which must exist.
fn find_tensor(set: &ProgramSet, name: &str) -> TensorId {
    set.find(name).unwrap_or_else(|| panic!("the Programs have no tensor `{name}`"))
}

/// Returns the tensor of this name; `None` if it does not exist or is not in `list`.
fn listed_tensor(set: &ProgramSet, list: &[TensorId], name: &str) -> Option<TensorId> {
    set.find(name).filter(|tensor| list.contains(tensor))
}
