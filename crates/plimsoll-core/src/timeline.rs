//! The memory of a device over one step: a list of [`TimelinePoint`] in each plan.

use crate::{Bytes, Category, WorkKind};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The predicted memory of a device's arena at one time of a step: the fullest of a part of the work.
///
/// All micro-batches use the same bytes, so the points of the forward and backward pass hold for each of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TimelinePoint {
    /// The kind of work at this point.
    pub work: WorkKind,
    /// The part of the model or the tensor that is worked on, such as `layer`, `loss` or `embedding`; `None` while the
    /// host fills inputs or reads outputs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<String>,
    /// The layer, counted from 0 at the first layer of the model; `None` outside the layers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer: Option<u32>,
    /// The op that runs, such as `product` or `attention_grad`; `None` while the host fills inputs or reads outputs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub op: Option<String>,
    /// The tensor that tells most about the op: a weight that it reads, else a gradient or optimizer state, else its
    /// output. A gathered or staged copy has the name of its tensor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tensor: Option<String>,
    /// Bytes of the arena in use. Their maximum over all points is the size of the arena.
    pub bytes: Bytes,
    /// The same bytes by category. Gaps between tensors count as workspace.
    pub by_category: BTreeMap<Category, Bytes>,
}

impl TimelinePoint {
    /// Describes the point in words: `in the backward pass, layer 3, at matrix product of down`.
    pub fn describe(&self) -> String {
        let work = match self.work {
            WorkKind::Load => "while loading",
            WorkKind::Forward => "in the forward pass",
            WorkKind::Backward => "in the backward pass",
            WorkKind::Update => "in the update",
            WorkKind::Evaluate => "in an evaluation",
            WorkKind::Score => "while scoring",
            WorkKind::Reference => "while scoring under the initial weights",
            WorkKind::Save => "while saving",
            WorkKind::Generate => "while generating",
            WorkKind::Replan => "in a change of plan",
        };
        format!("{work}, {}", self.describe_place())
    }

    /// Describes the place within the work: `layer 3, at matrix product of down`.
    pub fn describe_place(&self) -> String {
        let Some(op) = &self.op else { return "before the first op or after the last".to_owned() };
        let op = if op == "product" { "matrix product" } else { op };
        let subject = self.tensor.as_ref().map_or(String::new(), |tensor| format!(" of {tensor}"));
        let is_pass = !matches!(self.work, WorkKind::Load | WorkKind::Update | WorkKind::Save | WorkKind::Replan);
        match (self.layer, &self.part) {
            (Some(layer), _) => format!("layer {layer}, at {op}{subject}"),
            (None, Some(part)) if is_pass => format!("{part}, at {op}{subject}"),
            _ => format!("at {op}{subject}"),
        }
    }
}

/// Returns the first point with the most bytes, of those with this kind of work; `None` for all kinds of work. Returns
/// `None` without points.
pub fn peak_point(timeline: &[TimelinePoint], work: Option<WorkKind>) -> Option<&TimelinePoint> {
    let points = timeline.iter().filter(|point| work.is_none_or(|work| point.work == work));
    points.reduce(|best, point| if point.bytes > best.bytes { point } else { best })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(work: WorkKind, bytes: u64) -> TimelinePoint {
        TimelinePoint {
            work,
            part: Some("layer".to_owned()),
            layer: Some(3),
            op: Some("product".to_owned()),
            tensor: Some("down".to_owned()),
            bytes: Bytes(bytes),
            by_category: BTreeMap::new(),
        }
    }

    #[test]
    fn point_is_described_in_one_phrase() {
        let layer = point(WorkKind::Backward, 1);
        assert_eq!(layer.describe(), "in the backward pass, layer 3, at matrix product of down");
        let loss = TimelinePoint { layer: None, part: Some("loss".into()), tensor: None, ..layer.clone() };
        let loss = TimelinePoint { op: Some("softmax_stats".into()), ..loss };
        assert_eq!(loss.describe(), "in the backward pass, loss, at softmax_stats");
        let host = TimelinePoint { work: WorkKind::Save, part: None, layer: None, op: None, ..layer };
        assert_eq!(host.describe(), "while saving, before the first op or after the last");
        let update = TimelinePoint { layer: None, work: WorkKind::Update, ..point(WorkKind::Update, 1) };
        assert_eq!(update.describe(), "in the update, at matrix product of down");
    }

    #[test]
    fn first_of_equal_peaks_is_found() {
        let timeline = [(WorkKind::Forward, 5), (WorkKind::Backward, 9), (WorkKind::Update, 9)];
        let timeline = timeline.map(|(work, bytes)| point(work, bytes));
        assert_eq!(peak_point(&timeline, None).map(|point| point.work), Some(WorkKind::Backward));
        assert_eq!(peak_point(&timeline, Some(WorkKind::Update)).map(|point| point.bytes), Some(Bytes(9)));
        assert_eq!(peak_point(&timeline, Some(WorkKind::Save)), None);
        assert_eq!(peak_point(&[], None), None);
    }
}
