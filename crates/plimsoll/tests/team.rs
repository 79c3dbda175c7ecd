//! Runs on several unequal devices: the same experiment as on one device, within all load lines, and no device blocks the
//! others when it refuses memory, is slow or is lost. One file per subject.

mod data_parallel;
mod device_loss;
mod evaluator;
mod heartbeat;
mod helpers;
mod planning;
mod sharded;
