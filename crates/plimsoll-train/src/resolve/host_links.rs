//! The links between the hosts of a run: measured where the user does not give them.

use crate::remote::{self, RemoteDevices};
use plimsoll_core::{DeviceSpec, Failure, Link};
use plimsoll_device::error::DeviceError;
use plimsoll_plan::device_request::{DeviceRequest, DevicesRequest, LinkRequest};
use plimsoll_plan::paper;
use std::collections::BTreeSet;

/// Assumed bandwidth between hosts, in Gbit/s, if the user gives none and it cannot be measured.
pub(super) const ASSUMED_GBIT: f64 = 1.0;

/// Measures the network links of those remote devices for which the user gave none, and sets their `team_link`. The
/// devices of one host share its link. If all devices are on one remote host, the links between its devices are
/// measured instead.
///
/// # Errors
/// A device that cannot be reached, or a link that cannot be measured.
pub(super) fn measure_host_links(
    remote: &RemoteDevices,
    request: &DevicesRequest,
    devices: &mut [DeviceSpec],
) -> Result<(), Failure> {
    let unknown: Vec<String> =
        request.devices.iter().filter(|requested| has_unknown_link(requested)).map(DeviceRequest::name).collect();
    let Some(connector) = remote.connector().filter(|_| devices.len() > 1 && !unknown.is_empty()) else {
        return Ok(());
    };
    // `None` stands for this machine and sorts first.
    let mut hosts: Vec<Option<&str>> = devices.iter().map(DeviceSpec::remote_host).collect();
    hosts.sort_unstable();
    hosts.dedup();
    let several_hosts = hosts.len() > 1;
    // One device measures for each host; on a single host, all devices measure.
    let remote_devices: Vec<&DeviceSpec> = devices.iter().filter(|device| device.remote_host().is_some()).collect();
    let is_first_of_host = |device: &&&DeviceSpec| {
        remote_devices.iter().find(|other| other.remote_host() == device.remote_host()) == Some(*device)
    };
    let measuring: Vec<&DeviceSpec> =
        remote_devices.iter().filter(|device| !several_hosts || is_first_of_host(device)).copied().collect();
    let connections = measuring.iter().map(|device| remote.connection(&device.name)).collect::<Result<Vec<_>, _>>()?;
    let not_measured = |(rank, error): (usize, DeviceError)| {
        measurement_failure(measuring.get(rank).map_or("this machine", |device| &device.name), error)
    };
    let include_local = hosts[0].is_none();
    let links = remote::links::measure_slowest_links(&connections, include_local, &*connector).map_err(not_measured)?;
    let measured: Vec<(String, Link)> =
        measuring.iter().zip(&links).map(|(device, link)| (device.name.clone(), *link)).collect();
    for index in 0..devices.len() {
        let (host, name) = (devices[index].remote_host(), &devices[index].name);
        if !unknown.contains(name) {
            continue;
        }
        let applies = |(measured, _): &&(String, Link)| match several_hosts {
            true => measured.split_once('/').map(|(host, _)| host) == host,
            false => measured == name,
        };
        let sharing =
            if several_hosts { devices.iter().filter(|other| other.remote_host() == host).count() } else { 1 };
        let Some((_, link)) = measured.iter().find(applies) else { continue };
        let bytes_per_second = link.bytes_per_second / sharing as f64;
        devices[index].team_link = Link { bytes_per_second, ..*link };
        devices[index].link_measured = true;
    }
    Ok(())
}

/// Sets the links of paper devices on several machines for which the list gives none. The devices of one machine share
/// the slowest of its links to the others. A link that the list does not name is assumed, unless a device of one of the
/// two machines states its own. The devices without a machine are in one of their own.
pub(super) fn set_paper_links(request: &DevicesRequest, devices: &mut [DeviceSpec]) {
    if !request.has_paper_devices() {
        return;
    }
    let machines: BTreeSet<Option<&str>> = request.devices.iter().map(DeviceRequest::machine).collect();
    let states_link = |machine: Option<&str>| {
        request.devices.iter().any(|device| device.machine() == machine && device.team_link().is_some())
    };
    let link_between = |one: Option<&str>, other: Option<&str>| {
        let stated = one.zip(other).and_then(|(one, other)| request.link_between(one, other));
        let assumed = (!states_link(one) && !states_link(other)).then(|| paper::ethernet(ASSUMED_GBIT));
        stated.map(LinkRequest::link).or(assumed)
    };
    let slower = |a: Link, b: Link| if b.bytes_per_second < a.bytes_per_second { b } else { a };
    // The devices of a list on paper are those of the request, in its order.
    for (device, requested) in devices.iter_mut().zip(&request.devices).filter(|(_, asked)| asked.team_link().is_none())
    {
        let machine = requested.machine();
        let others = machines.iter().filter(|other| **other != machine);
        let Some(link) = others.filter_map(|other| link_between(machine, *other)).reduce(slower) else { continue };
        let sharing = request.devices.iter().filter(|device| device.machine() == machine).count();
        device.team_link = Link { bytes_per_second: link.bytes_per_second / sharing as f64, ..link };
    }
}

/// Returns the failure of a run if the links of a device or of this machine cannot be measured.
fn measurement_failure(name: &str, error: DeviceError) -> Failure {
    let failure = remote::unreachable_failure(error);
    Failure { message: format!("run.devices: the links of {name} cannot be measured: {}", failure.message), ..failure }
}

/// Returns whether a device is remote and the user gave no link for it.
fn has_unknown_link(requested: &DeviceRequest) -> bool {
    match requested {
        DeviceRequest::Remote { device, team_link, .. } => {
            team_link.is_none() && !matches!(&**device, DeviceRequest::Virtual { team_link: Some(_), .. })
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use crate::resolve::devices::resolve_devices;
    use crate::resolve::tests::run_request;

    #[test]
    fn machines_on_paper_share_their_links() {
        let rates = |devices: &str| {
            let devices =
                resolve_devices(&run_request(&["model.preset=7b", &format!("run.devices={devices}")])).unwrap();
            devices.iter().map(|device| device.team_link.bytes_per_second / 1e6).collect::<Vec<_>>()
        };
        assert_eq!(rates("pc1/rtx3090,pc2/2xrtx3070,pc1-pc2=10gbit"), [1180.0, 590.0, 590.0]);
        // The slowest link counts, and one that is not named is assumed.
        assert_eq!(rates("a/rtx3090,b/rtx3070,c/rtx3070,a-b=10gbit,c-a=2.5gbit"), [295.0, 118.0, 118.0]);
        // A stated link replaces the assumed one.
        assert_eq!(rates("a/rtx3090@10gbit,b/rtx3070@10gbit"), [1180.0, 1180.0]);
        // The cards without a machine are in one of their own.
        assert_eq!(rates("2xrtx3090,pc2/rtx3070"), [59.0, 59.0, 118.0]);
        let one_machine = rates("pc1/rtx3090,pc1/rtx3090");
        assert_eq!(one_machine, rates("rtx3090,rtx3090"));
    }
}
