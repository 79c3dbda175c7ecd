//! Devices for the tests of this module.

use plimsoll_core::{Budget, Bytes, DeviceKind, DeviceSpec};
use plimsoll_plan::paper;

/// Returns a device of this kind under a load line of 8 GiB, with the rates and charges of an RTX 3090's data sheet.
pub(super) fn device(name: &str, kind: DeviceKind) -> DeviceSpec {
    let device = paper::paper("rtx3090", Budget::Amount(Bytes::gib(8))).expect("the table has this device");
    DeviceSpec { name: name.to_owned(), kind, ..device }
}
