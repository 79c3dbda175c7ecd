//! How the devices of a team are told their places, and what carries bytes between them: in this process, or over wires where some
//! live elsewhere.

use super::{Team, Worker};
use crate::remote::Hosts;
use crate::remote::spread::{Gathered, Member as Reached, Spread};
use crate::session::trouble::Trouble;
use plimsoll_core::DeviceKind;
use plimsoll_device::cuda::collectives;
use plimsoll_device::device::{DeviceError, NoFiles};
use plimsoll_device::transport::{Seat, Transport, memory};
use std::sync::Arc;

/// What carries bytes between these devices: those of a GPU go through its staging.
pub(super) fn transport(workers: &[Worker]) -> Arc<dyn Transport> {
    let ranks = workers.len() as u32;
    match workers.iter().any(|worker| worker.device.kind == DeviceKind::Cuda) {
        true => memory::Memory::in_rounds(ranks, collectives::ROUND_BYTES),
        false => memory::Memory::between(ranks),
    }
}

impl Team {
    /// Tells every device its place. Who falls silent meanwhile is missed, too.
    pub(super) fn seat(&mut self) -> Result<(), Trouble> {
        self.watch();
        if self.len() <= 1 {
            return Ok(());
        }
        let apart = self.workers.iter().any(Worker::is_far);
        let mut seats: Vec<Option<Seat>> = match self.elsewhere.hosts().filter(|_| apart) {
            Some(hosts) => self.gather(&*hosts)?,
            None => {
                let seat = |rank| Some(Seat { rank, transport: Arc::clone(&self.transport), nccl: self.has_nccl() });
                (0..self.len() as u32).map(seat).collect()
            }
        };
        self.each(&mut NoFiles, |rank, _| {
            let seat = seats[rank].take();
            Some(Box::new(move |engine, _| Ok(engine.sit(seat)?)))
        })?;
        Ok(())
    }

    /// Whether all exchange by NCCL.
    fn has_nccl(&self) -> bool {
        self.workers.iter().all(|worker| worker.device.nccl.is_some())
    }

    /// Has devices find each other some of which live elsewhere: they meet over wires. Gives the seats of those that are here.
    fn gather(&mut self, hosts: &dyn Hosts) -> Result<Vec<Option<Seat>>, Trouble> {
        let reached = |worker: &Worker| match worker.engine.far() {
            Some(connection) => Reached::Far(Arc::clone(connection)),
            None => Reached::Here,
        };
        let members: Vec<Reached> = self.workers.iter().map(reached).collect();
        self.teams += 1;
        let lost = |(rank, error): (usize, DeviceError)| match Trouble::from(error).of_rank(rank) {
            Trouble::Peer(error) => Trouble::Lost { rank, why: error.to_string() },
            other => other,
        };
        let Gathered { transport, seats } =
            Spread::gather(&members, hosts, self.teams, self.has_nccl()).map_err(lost)?;
        self.transport = transport;
        // Who is missed from now on is so by this team.
        self.watch();
        Ok(seats)
    }
}
