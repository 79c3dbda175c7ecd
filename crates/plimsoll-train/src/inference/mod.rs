//! Inference with a model: its loss on data, text from prompts, conversations, and export.
//!
//! Evaluation and generation are planned first and run second, so a command can print the plan or refuse it.
//!
//! | module | content |
//! |---|---|
//! | `evaluation` | the loss on data |
//! | `generation` | plans of text generation, and answers to prompts |
//! | `chat` | a conversation with the user, within the planned cache |
//! | `batch`, `ordered_answers` | several prompts answered at once, and their answers in order |
//! | `completions` | completions of prompts for training, with their log-probabilities |
//! | `decoding`, `sampling`, `text_stream` | tokens one after another, the choice of each, their text |
//! | `samples` | the sample answers that a run shows at its end |
//! | `merged_model` | adapters merged into their base model |
//! | `export` | a Hugging Face directory, or a GGUF file for llama.cpp and Ollama |

pub(crate) mod batch;
pub mod chat;
pub(crate) mod completions;
mod decoding;
pub mod evaluation;
pub mod export;
pub mod generation;
mod merged_model;
mod ordered_answers;
pub mod samples;
pub mod sampling;
mod text_stream;

pub use decoding::{CachedDecoder, EndReason};

use crate::engine::Engine;
use crate::engine::failure::DeviceFailure;
use crate::engine::tensor_files::load_weights;
use crate::planning::planner::{Charges, Planner};
use crate::resolve::{Resolved, RunRequest, Workload};
use plimsoll_core::Failure;
use plimsoll_plan::search::PlanOutcome;
use std::sync::Arc;

/// Plans an evaluation or a generation on the device of `resolved`. If it does not fit there, plans for the processor
/// where that is allowed. Sets the charges (bytes outside the arena) of the device to those of the plan.
fn plan_work(request: &RunRequest, resolved: &mut Resolved, work: Workload) -> Result<PlanOutcome, Failure> {
    let model = Arc::clone(&resolved.model);
    Planner::new(request, &model, Charges::Measured).plan_chosen_device(resolved, work)
}

/// Opens the device of `resolved` with the arena and Programs of a plan, and loads the model's weights.
fn open_engine(request: &RunRequest, resolved: &Resolved, outcome: PlanOutcome) -> Result<Engine, DeviceFailure> {
    let (sequence, vocab) = (u64::from(request.data.sequence), resolved.model.config.vocab);
    let device = &resolved.device;
    let precision = outcome.precision;
    let mut engine = Engine::open(outcome, precision, device, None, request.scratch_folder(), sequence, vocab)?;
    load_weights(&mut engine, &resolved.model, request)?;
    Ok(engine)
}
