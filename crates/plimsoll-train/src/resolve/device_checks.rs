//! Checks of requested devices against the cores and memory of this machine, before any device is looked at.

use super::RunRequest;
use plimsoll_core::{Budget, Bytes, Failure};
use plimsoll_plan::device_request::DeviceRequest;

/// Share of this machine's cores that all virtual devices together may use.
const VIRTUAL_CORE_SHARE: f64 = 0.8;

/// Checks that this machine has the memory for load lines that are amounts, such as `6GiB`. Load lines that are shares
/// of free memory always fit. `total` is the memory of this machine.
///
/// # Errors
/// Load lines in this machine's memory that exceed `total` together.
pub(super) fn check_budgets(run: &RunRequest, devices: &[DeviceRequest], total: Bytes) -> Result<(), Failure> {
    let in_host_memory =
        |requested: &&DeviceRequest| matches!(requested, DeviceRequest::Cpu { .. } | DeviceRequest::Virtual { .. });
    // If the user changed a load line while the run was active, the line in the run file does not count.
    let amount = |requested: &DeviceRequest| {
        let unchanged = !run.budget_overrides.contains_key(&requested.name());
        let budget = unchanged.then(|| requested.budget().unwrap_or(run.memory.device_budget()));
        budget.and_then(Budget::amount).map(|line| (requested.name(), line))
    };
    let amounts: Vec<(String, Bytes)> = devices.iter().filter(in_host_memory).filter_map(amount).collect();
    let own = devices.iter().filter(in_host_memory).any(|requested| requested.budget().is_some());
    check_total(if own { "run.devices" } else { "memory.budget" }, &amounts, "this machine", total)?;
    let is_accelerator =
        |requested: &DeviceRequest| matches!(requested, DeviceRequest::Cuda { .. } | DeviceRequest::Virtual { .. });
    if devices.iter().any(is_accelerator) {
        let key = if run.devices().host.is_some() { "run.devices" } else { "memory.host" };
        let amount = run.host_budget().amount().map(|line| ("host".to_owned(), line));
        check_total(key, amount.as_slice(), "this machine", total)?;
    }
    Ok(())
}

/// Checks that the load lines in `lines`, each with its device's name, sum up to at most `total`, the memory of
/// `owner`. Accepts all if `total` is 0, because the system does not report its memory. `key` is the setting that gives
/// the load lines, for the message.
pub(super) fn check_total(key: &str, lines: &[(String, Bytes)], owner: &str, total: Bytes) -> Result<(), Failure> {
    let sum: Bytes = lines.iter().map(|(_, line)| *line).sum();
    if sum <= total || total == Bytes::ZERO {
        return Ok(());
    }
    let names: Vec<&str> = lines.iter().map(|(name, _)| &**name).collect();
    let message = format!("{key}: {} may hold {sum}, and {owner} has {total}", names.join(" and "));
    Err(Failure::input(message).hint("use smaller amounts, or shares of free memory, such as 50%"))
}

/// Checks that virtual devices together use at most 80 % of this machine's `cores`.
pub(super) fn check_virtual_paces(devices: &[DeviceRequest], cores: f64) -> Result<(), Failure> {
    let pace = |device: &DeviceRequest| match device {
        DeviceRequest::Virtual { pace, .. } => *pace,
        _ => 0.0,
    };
    let (paces, limit) = (devices.iter().map(pace).sum::<f64>(), VIRTUAL_CORE_SHARE * cores);
    // Decimal paces that add up to the limit may exceed it slightly in binary.
    if paces <= limit * (1.0 + 1e-9) {
        return Ok(());
    }
    let message =
        format!("run.devices: virtual devices of {paces:.2} cores in all; this machine gives them {limit:.2}");
    Err(Failure::input(message).hint(format!(
        "that is {VIRTUAL_CORE_SHARE} of its {} cores: choose smaller paces behind the `@`",
        (cores * 100.0).round() / 100.0
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resolve::tests::{refusal, run_request};
    use plimsoll_plan::device_request::DevicesRequest;

    #[test]
    fn load_lines_above_machine_memory_are_rejected() {
        let check = |settings: &[&str]| {
            let run = run_request(&[&["model.preset=smollm2-135m"], settings].concat());
            check_budgets(&run, &run.devices().devices, Bytes::gib(16)).map_err(|failure| failure.message)
        };
        for (settings, message) in [
            (&["run.devices=cpu=900GiB"][..], "run.devices: cpu may hold 900.00 GiB, and this machine has 16.00 GiB"),
            (
                &["run.devices=virtual:a=10GiB@0.2,virtual:b=8GiB@0.2"],
                "run.devices: virtual:a and virtual:b may hold 18.00 GiB, and this machine has 16.00 GiB",
            ),
            (
                &["run.devices=cpu", "memory.budget=17GiB"],
                "memory.budget: cpu may hold 17.00 GiB, and this machine has 16.00 GiB",
            ),
            (
                &["run.devices=virtual:a=1GiB@0.2,host=17GiB"],
                "run.devices: host may hold 17.00 GiB, and this machine has 16.00 GiB",
            ),
            (
                &["run.devices=cuda:0", "memory.host=17GiB"],
                "memory.host: host may hold 17.00 GiB, and this machine has 16.00 GiB",
            ),
        ] {
            assert_eq!(check(settings), Err(message.to_owned()));
        }
        assert_eq!(check(&["run.devices=cpu=16GiB", "memory.host=17GiB"]), Ok(()));
        assert_eq!(check(&["run.devices=cpu,virtual:a=16GiB@0.2"]), Ok(()));
        assert_eq!(check(&["run.devices=rtx3090=23GiB,host=64GiB"]), Ok(()));
        // A load line that was changed while the run was active replaces the one in the run file.
        let mut changed = run_request(&["model.preset=smollm2-135m", "run.devices=cpu=900GiB"]);
        changed.budget_overrides.insert("cpu".to_owned(), "64MiB".parse().unwrap());
        assert!(check_budgets(&changed, &changed.devices().devices, Bytes::gib(16)).is_ok());
        let settings = &["model.preset=smollm2-135m", "run.devices=virtual:a=64MiB@0.2,virtual:b=921600GiB@0.2"];
        assert!(refusal(settings).starts_with("run.devices: virtual:a and virtual:b may hold 900.00 TiB, and this"));
    }

    #[test]
    fn virtual_devices_leave_a_fifth_of_cores() {
        let check = |devices: &str, cores| {
            let request: DevicesRequest = devices.parse().unwrap();
            check_virtual_paces(&request.devices, cores)
        };
        let three = "virtual:a=1GiB@0.3,virtual:b=1GiB@0.3,virtual:c=1GiB@0.2";
        assert!(check(three, 1.0).is_ok());
        assert!(check("cpu", 1.0).is_ok());
        assert_eq!(
            check("virtual:a=1GiB,virtual:b=1GiB@0.7", 2.0).unwrap_err().to_string(),
            "run.devices: virtual devices of 1.70 cores in all; this machine gives them 1.60\n  \
             hint: that is 0.8 of its 2 cores: choose smaller paces behind the `@`"
        );
    }
}
