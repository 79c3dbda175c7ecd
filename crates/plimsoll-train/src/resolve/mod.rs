//! The meaning of a run file on this machine: its model, its devices with load lines and rates, and their charges before data
//! is open. Nothing here plans, trains or reads weights; `planning` builds on the result.
//!
//! | module | content |
//! |---|---|
//! | `request` | [`RunRequest`]: the run file with remote connections and changed load lines |
//! | `model` | [`Model`]: what `[model]` names |
//! | `devices` | the devices that `run.devices` names |
//! | `gpus` | the GPUs of this machine |
//! | `gpu_processes` | other processes that hold memory of these GPUs |
//! | `device_checks` | checks of requested devices against cores and memory |
//! | `host_links` | measured links between hosts |
//! | `nominal` | figures of devices without measurements, for plans that are the same at each start |
//! | `charges` | bytes of this process outside arenas |
//! | `hub` | ids of the Hugging Face Hub, in whose place local paths are put |
//! | `example` | the built-in example, used where no model or device is named |

pub(crate) mod budget_overrides;
pub(crate) mod charges;
mod device_checks;
pub(crate) mod devices;
pub(crate) mod example;
pub(crate) mod gpu_processes;
mod gpus;
mod host_links;
mod hub;
pub(crate) mod model;
pub(crate) mod nominal;
mod request;

pub use charges::process_bytes;
pub use devices::{
    NamedDevice, check_requested_devices, contention_note, cpu_duty, list_named_devices, resolve_devices,
};
pub use example::write_example;
pub use gpu_processes::GpuProcess;
pub use hub::{HubNeed, fetch_hub_files, fetch_hub_model};
pub use model::Model;
pub use request::RunRequest;

use devices::choose_nccl;
use plimsoll_core::{DeviceSpec, Failure, Fallback};
use plimsoll_program::models::decoder::Generation;
use std::sync::Arc;

/// The work that the planner makes room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// A training run, with evaluations if there is evaluation data, and with samples if the data can be read as text.
    Train,
    /// An evaluation without training.
    Evaluate,
    /// Generation of tokens from a prompt.
    Generate(Generation),
}

/// The model and devices of a run. Requests to the planner borrow from it.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// The model; devices that load it share it.
    pub model: Arc<Model>,
    /// The first or only device. Its charges (bytes outside the arena) are assumed until model and data are open.
    pub device: DeviceSpec,
    /// All other devices of the run: those that the user named, or the default ones if the user named none.
    pub others: Vec<DeviceSpec>,
    /// The requested accelerator that the processor replaces; `None` if nothing is replaced.
    pub fallback: Option<Fallback>,
}

impl Resolved {
    /// Joins the model with the devices that a run names. Looks up or measures their load lines and rates.
    ///
    /// # Errors
    /// Sequences that the model does not support, or devices that cannot be used.
    pub fn new(run: &RunRequest, model: Model) -> Result<Resolved, Failure> {
        model.check_sequence_length(run)?;
        model.check_new_adapters(run)?;
        let mut devices = resolve_devices(run)?;
        choose_nccl(run, &mut devices);
        let others = devices.split_off(1);
        Ok(Resolved { model: Arc::new(model), device: devices.remove(0), others, fallback: None })
    }

    /// Returns all devices of the run, the first one first.
    pub fn devices(&self) -> impl Iterator<Item = &DeviceSpec> {
        std::iter::once(&self.device).chain(&self.others)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::config::RunConfig;

    pub(crate) fn run_request(settings: &[&str]) -> RunRequest {
        let settings: Vec<String> = settings.iter().map(|setting| (*setting).to_owned()).collect();
        RunConfig::parse("run.toml", "", &settings).unwrap().into()
    }

    /// Returns the message and hints of the failure to resolve a run with these settings.
    pub(crate) fn refusal(settings: &[&str]) -> String {
        let run = run_request(settings);
        let failure = Model::open(&run).and_then(|model| Resolved::new(&run, model)).expect_err("this run is invalid");
        assert_eq!(failure.exit as i32, 2);
        failure.to_string()
    }

    #[test]
    fn unsupported_models_are_named() {
        let model = "model.preset=smollm2-135m";
        assert_eq!(
            refusal(&["model.preset=smolm2-135m", "run.devices=rtx3090"]),
            "model.preset: `smolm2-135m` is no known shape\n  hint: did you mean `smollm2-135m`?"
        );
        assert!(
            refusal(&[model, "lora.targets=[\"qkv_proj\"]", "run.devices=rtx3090"])
                .starts_with("lora.targets names qkv_proj, which a llama model does not have")
        );
        assert!(
            refusal(&[model, "data.sequence=1048576", "run.devices=rtx3090"])
                .starts_with("data.sequence is 1048576, but smollm2-135m takes no more than ")
        );
    }
}
