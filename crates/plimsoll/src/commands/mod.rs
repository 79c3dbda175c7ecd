//! One module per command: builds the configuration, calls the libraries and prints the result.

pub mod advice;
mod answer_file;
pub mod budget;
mod cluster;
pub mod data;
pub mod devices;
pub mod doctor;
pub mod export;
pub mod generate;
mod hub;
pub mod init;
pub mod model;
pub mod model_list;
pub mod model_training;
pub mod models;
mod page_process;
pub mod plan;
pub mod rates;
pub mod ray;
pub mod report;
pub mod runs;
pub mod serve;
pub mod sweep;
pub mod train;
mod view_process;
pub mod watch;
mod watch_process;
