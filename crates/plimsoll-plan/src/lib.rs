//! What fits: packing, prices, the search for the fastest recipe under the load line, and what devices there are on
//! paper. Pure: nothing here touches a device, a file or a clock.

#![forbid(unsafe_code)]

pub mod layout;
pub mod lifetimes;
pub mod packing;
pub mod paper;
pub mod price;
pub mod request;
pub mod search;
pub mod sweep;
pub mod team;
