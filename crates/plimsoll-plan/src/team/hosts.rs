//! The host memories of a team: one for each machine, which the devices of the machine share.

use super::TeamRequest;
use plimsoll_core::Bytes;

/// A machine of a team.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    /// The devices of the machine.
    pub devices: Vec<usize>,
    /// The load line of its host.
    pub host: Bytes,
}

impl TeamRequest<'_> {
    /// Returns the machines of the team, in the order of their first devices. On a single machine, the devices share the
    /// host of the request; on several, each machine has the host of its own requests.
    pub(super) fn machines(&self) -> Vec<Machine> {
        let mut machines: Vec<(Option<&str>, Machine)> = Vec::new();
        for (device, request) in self.devices.iter().enumerate() {
            let name = request.device.remote_host();
            let host = request.host.budget;
            match machines.iter_mut().find(|(known, _)| *known == name) {
                Some((_, machine)) => {
                    machine.devices.push(device);
                    machine.host = machine.host.max(host);
                }
                None => machines.push((name, Machine { devices: vec![device], host })),
            }
        }
        if let [(_, only)] = &mut machines[..] {
            only.host = self.host;
        }
        machines.into_iter().map(|(_, machine)| Machine { host: machine.host.min(self.host), ..machine }).collect()
    }

    /// Returns, for each device, the load line of the host of its machine.
    pub(super) fn hosts(&self) -> Vec<Bytes> {
        let mut hosts = vec![Bytes::ZERO; self.devices.len()];
        for machine in self.machines() {
            machine.devices.iter().for_each(|&device| hosts[device] = machine.host);
        }
        hosts
    }

    /// Returns, for each device, the number of its machine among the machines.
    pub(super) fn machine_numbers(&self) -> Vec<usize> {
        let mut numbers = vec![0; self.devices.len()];
        for (number, machine) in self.machines().iter().enumerate() {
            machine.devices.iter().for_each(|&device| numbers[device] = number);
        }
        numbers
    }

    /// Returns the devices of the machines whose hosts are too small for the bytes that their devices use together.
    /// `used` has pairs of a device and its bytes. The result is empty if all fit.
    pub(super) fn crowded_devices(&self, used: &[(usize, Bytes)]) -> Vec<usize> {
        let mut crowded = Vec::new();
        for machine in self.machines() {
            let here = used.iter().filter(|(device, _)| machine.devices.contains(device));
            if here.map(|(_, bytes)| *bytes).sum::<Bytes>() > machine.host {
                crowded.extend(machine.devices);
            }
        }
        crowded
    }
}
