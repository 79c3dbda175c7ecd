//! Communication groups: assigns ranks to the workers and connects them, in this process or over the network.

use super::{Team, Worker};
use crate::engine::failure::DeviceFailure;
use crate::remote::RemoteConnector;
use crate::remote::distributed::{ConnectedTeam, DistributedTransport, TeamEndpoint};
use plimsoll_core::DeviceKind;
use plimsoll_device::cuda::collectives;
use plimsoll_device::device::NoFiles;
use plimsoll_device::error::DeviceError;
use plimsoll_device::transport::{GroupHandle, Transport, in_process};
use std::sync::Arc;

/// Creates the transport between workers of this process. If one of them is a GPU, exchanges run in rounds of the size
/// of a GPU's staging buffer.
pub(super) fn transport(workers: &[Worker]) -> Arc<dyn Transport> {
    let ranks = workers.len() as u32;
    match workers.iter().any(|worker| worker.device.kind == DeviceKind::Cuda) {
        true => in_process::InProcessTransport::new_group_with_rounds(ranks, collectives::ROUND_BYTES),
        false => in_process::InProcessTransport::new_group(ranks),
    }
}

impl Team {
    /// Restarts the heartbeat monitor and forms the communication group of the present workers. A single worker needs
    /// no group. A device that misses its heartbeats meanwhile is lost.
    pub(super) fn form_group(&mut self) -> Result<(), DeviceFailure> {
        self.start_monitor();
        if self.len() <= 1 {
            return Ok(());
        }
        let has_remote = self.workers.iter().any(Worker::is_remote);
        let mut handles: Vec<Option<GroupHandle>> = match self.remote.connector().filter(|_| has_remote) {
            Some(connector) => self.form_remote_group(&*connector)?,
            None => {
                let handle =
                    |rank| Some(GroupHandle { rank, transport: Arc::clone(&self.transport), nccl: self.has_nccl() });
                (0..self.len() as u32).map(handle).collect()
            }
        };
        self.run_tasks(&mut NoFiles, |rank, _| {
            let handle = handles[rank].take();
            Some(Box::new(move |engine, _| Ok(engine.join_group(handle)?)))
        })?;
        Ok(())
    }

    /// Returns whether all workers of the team are GPUs that exchange by NCCL.
    fn has_nccl(&self) -> bool {
        self.workers.iter().all(|worker| worker.device.nccl.is_some())
    }

    /// Connects workers of several processes over the network. Returns the group handle of each worker in rank order;
    /// `None` for a remote worker, which has its own.
    fn form_remote_group(
        &mut self,
        connector: &dyn RemoteConnector,
    ) -> Result<Vec<Option<GroupHandle>>, DeviceFailure> {
        let to_member = |worker: &Worker| match worker.engine.connection() {
            Some(connection) => TeamEndpoint::Remote(Arc::clone(connection)),
            None => TeamEndpoint::Local,
        };
        let endpoints: Vec<TeamEndpoint> = self.workers.iter().map(to_member).collect();
        self.group_count += 1;
        let lost = |(rank, error): (usize, DeviceError)| match DeviceFailure::from(error).with_rank(rank) {
            DeviceFailure::PeerAborted(error) => DeviceFailure::Lost { rank, reason: error.to_string() },
            other => other,
        };
        let ConnectedTeam { transport, groups } =
            DistributedTransport::connect_team(&endpoints, connector, self.group_count, self.has_nccl())
                .map_err(lost)?;
        self.transport = transport;
        // The new transport needs a monitor of its own.
        self.start_monitor();
        Ok(groups)
    }
}
