//! The closed set of ops. Each says in one place what it reads and writes, what may share a
//! buffer, how much it computes and moves; its derivative is in [`crate::derivative`].
//!
//! What coarse formats hold and how their codes are found is in [`crate::formats`].
//!
//! Legend: N rows (tokens of a micro-batch, B sequences × T), D hidden, H heads, K kv heads, E head
//! dim, F ffn, V vocabulary, C = (H + 2K)·E columns of the fused queries | keys | values.
//! Matrices are row-major; weights are [out, in] as in Hugging Face files.

use crate::formats::{NF4_BLOCK, NF4_GROUP, STATE_BLOCK};
use crate::tensor::{Index, Operand, TensorId};
use plimsoll_core::DType;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// The queue an op runs on. Order between queues follows from hazards on arena ranges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Queue {
    /// Arithmetic.
    #[default]
    Compute,
    /// Copies into the device.
    CopyIn,
    /// Copies out of the device.
    CopyOut,
    /// Collectives.
    Communication,
    /// Work of the host's processor on tensors of the host's space.
    Host,
    /// Copies out of the scratch file.
    FileRead,
    /// Copies into the scratch file.
    FileWrite,
}

impl Queue {
    /// Whether the host's processor does what is on it, beside a device that does not.
    pub fn is_hosts(self) -> bool {
        matches!(self, Queue::Host | Queue::FileRead | Queue::FileWrite)
    }
}

/// An op and the queue it runs on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Op {
    /// What it does.
    pub kind: OpKind,
    /// Where it is queued.
    pub queue: Queue,
}

impl From<OpKind> for Op {
    fn from(kind: OpKind) -> Op {
        Op { kind, queue: Queue::Compute }
    }
}

/// How RoPE's frequencies are stretched.
pub use crate::models::config::RopeScaling;

/// The shape of an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Heads {
    /// H, query heads.
    pub heads: u64,
    /// K, key and value heads.
    pub kv_heads: u64,
    /// E, elements of a head.
    pub head_dim: u64,
}

impl Heads {
    /// C, columns of the fused queries | keys | values.
    pub fn columns(self) -> u64 {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// H·E, columns of the attention's output.
    pub fn query_columns(self) -> u64 {
        self.heads * self.head_dim
    }

    /// Heads that are normed and rotated: queries and keys.
    pub fn rotated(self) -> u64 {
        self.heads + self.kv_heads
    }
}

/// Collectives between the devices of a team. Each rank has a part of every piece: `counts` of its exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Collective {
    /// Everybody gets the sum, in place; a rank's part is what it sums up for all.
    AllReduce,
    /// The sum of everybody's input is added to what the output has: each rank gets its own part of it.
    ReduceScatter,
    /// Everybody gets everybody's part.
    AllGather,
    /// To one peer.
    Send,
    /// From one peer.
    Receive,
}

/// A run of elements in a collective.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Piece {
    /// What this rank gives: all parts where there is a sum, else its own.
    pub input: Operand,
    /// What it gets: all parts, or its own where sums are scattered.
    pub output: Operand,
    /// Elements of each rank's part.
    pub counts: Vec<u64>,
}

/// A collective as one rank takes part in it. All ranks of a team start the same ones, in the same order, with the same
/// counts. Sums are taken in the order of the ranks, so everybody has the same bits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Exchange {
    /// What happens.
    pub collective: Collective,
    /// What takes part: several tensors go as one.
    pub pieces: Vec<Piece>,
    /// Whose Program this is.
    pub rank: u32,
    /// The other end of a message.
    pub peer: Option<u32>,
    /// Its number: unique within its Program, in each iteration of its block.
    pub sequence: Index,
    /// Whether it is done in the last micro-batch of a step alone: what is summed over micro-batches is whole then.
    pub last: bool,
}

impl Exchange {
    /// Whether it goes from one rank to another, and the others have no part in it.
    pub fn is_message(&self) -> bool {
        matches!(self.collective, Collective::Send | Collective::Receive)
    }

    /// Elements of a piece that this rank reads, and those that it writes.
    pub fn elements(&self, piece: &Piece) -> (u64, u64) {
        let (total, own) = (piece.counts.iter().sum(), piece.counts[self.rank as usize]);
        match self.collective {
            Collective::AllReduce => (total, total),
            Collective::ReduceScatter => (total, own),
            Collective::AllGather => (own, total),
            Collective::Send => (own, 0),
            Collective::Receive => (0, own),
        }
    }
}

/// Where a quantised matrix, or whole blocks of one, stand ([`crate::formats`]).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Quantised {
    /// A scale for each row.
    Int8 {
        /// A byte for each element.
        codes: Operand,
        /// f32, one for each row.
        scales: Operand,
    },
    /// 4 bit, with scales of 8 bit.
    Nf4 {
        /// A byte for two elements.
        codes: Operand,
        /// A byte for 64 elements.
        scales: Operand,
        /// f32 mean and largest distance, for 256 scales.
        groups: Operand,
    },
}

impl Quantised {
    /// Its operands, and how many elements of each belong to so many of the matrix.
    pub fn parts(self, elements: u64, columns: u64) -> Vec<(Operand, u64)> {
        match self {
            Quantised::Int8 { codes, scales } => vec![(codes, elements), (scales, elements / columns)],
            Quantised::Nf4 { codes, scales, groups } => {
                let blocks = elements.div_ceil(NF4_BLOCK);
                vec![(codes, elements.div_ceil(2)), (scales, blocks), (groups, 2 * blocks.div_ceil(NF4_GROUP))]
            }
        }
    }
}

/// Numbers of each row that tell of its softmax: see [`OpKind::SoftmaxStats`].
pub const SOFTMAX_STATS: u64 = 4;

/// What an op does, with its operands and sizes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "fields are the letters of the legend and operands named by role")]
pub enum OpKind {
    /// `out[m,n]` = scale·a·b (+ `bias[n]`) (+ `residual[m,n]`), or out += scale·a·b. `a` is `[m,k]` (`[k,m]` if
    /// transposed), `b` is `[k,n]` (`[n,k]`). Rows of `a` as it is stored lie `a_stride` elements apart, those of
    /// `out` `out_stride`: more than their length where only some columns of a wider matrix are meant (the adapter of
    /// queries alone).
    Product {
        a: Operand,
        b: Operand,
        out: Operand,
        bias: Option<Operand>,
        residual: Option<Operand>,
        workspace: Operand,
        m: u64,
        n: u64,
        k: u64,
        a_transposed: bool,
        b_transposed: bool,
        a_stride: u64,
        out_stride: u64,
        scale: f64,
        accumulate: bool,
    },
    /// `out[N,D]` = rows of `table[V,D]`.
    Embed { tokens: Operand, table: Operand, out: Operand, rows: u64, hidden: u64, vocab: u64 },
    /// `dtable[V,D]` += rows of `dout[N,D]`.
    EmbedGrad {
        tokens: Operand,
        dout: Operand,
        dtable: Operand,
        workspace: Operand,
        rows: u64,
        hidden: u64,
        vocab: u64,
    },
    /// out = x / rms(x) · weight; `rstd[R]` = 1 / rms.
    RmsNorm { x: Operand, weight: Operand, out: Operand, rstd: Operand, rows: u64, dim: u64, eps: f64 },
    /// dx = or +=, dweight += where the weight is trained.
    RmsNormGrad {
        x: Operand,
        weight: Operand,
        rstd: Operand,
        dout: Operand,
        dx: Operand,
        dweight: Option<Operand>,
        workspace: Operand,
        rows: u64,
        dim: u64,
        accumulate: bool,
    },
    /// RMS norm of each query and key head; values are copied. rstd[N, H+K].
    HeadNorm {
        x: Operand,
        q_weight: Operand,
        k_weight: Operand,
        out: Operand,
        rstd: Operand,
        rows: u64,
        shape: Heads,
        eps: f64,
    },
    /// Turns dout into dx in place; the gradients of q_weight and k_weight += where they are trained.
    HeadNormGrad {
        x: Operand,
        q_weight: Operand,
        k_weight: Operand,
        rstd: Operand,
        dx: Operand,
        dweights: Option<[Operand; 2]>,
        workspace: Operand,
        rows: u64,
        shape: Heads,
    },
    /// Rotates query and key heads of `qkv[N,C]` in place by `positions[N]`; `table[P,E]` is cos | sin.
    Rope { qkv: Operand, table: Operand, positions: Operand, rows: u64, table_rows: u64, shape: Heads, inverse: bool },
    /// Fills `table[P,E]`.
    RopeTable { table: Operand, table_rows: u64, head_dim: u64, theta: f64, scaling: RopeScaling },
    /// Causal attention within documents: query i of a sequence sees keys `document_start[i] ..= i`.
    /// `out[N, H·E]`, `stats[B,H,T]` = log-sum-exp of the scores.
    Attention {
        qkv: Operand,
        document_start: Operand,
        out: Operand,
        stats: Operand,
        workspace: Operand,
        batch: u64,
        sequence: u64,
        shape: Heads,
    },
    /// `dqkv[N,C]` is written whole.
    AttentionGrad {
        qkv: Operand,
        out: Operand,
        dout: Operand,
        stats: Operand,
        document_start: Operand,
        dqkv: Operand,
        workspace: Operand,
        batch: u64,
        sequence: u64,
        shape: Heads,
    },
    /// Attention of n new tokens over a cache that holds them already; the length before is a scalar.
    CachedAttention {
        qkv: Operand,
        keys: Operand,
        values: Operand,
        scalars: Operand,
        out: Operand,
        workspace: Operand,
        rows: u64,
        capacity: u64,
        shape: Heads,
    },
    /// Keys and values of n tokens into the cache, after those it holds.
    AppendCache {
        qkv: Operand,
        keys: Operand,
        values: Operand,
        scalars: Operand,
        rows: u64,
        capacity: u64,
        shape: Heads,
    },
    /// `out[N,F]` = silu(gate) · up of `gate_up[N,2F]`.
    SwiGlu { gate_up: Operand, out: Operand, rows: u64, ffn: u64 },
    /// `dgate_up[N,2F]`; may stand where gate_up stood.
    SwiGluGrad { gate_up: Operand, dout: Operand, dgate_up: Operand, rows: u64, ffn: u64 },
    /// What is known of the softmax of each row once `logits[R, columns]`, the logits from column `first` of the
    /// vocabulary on, are seen, too: `stats[R, 4]` = the largest logit, Σ e^(x − largest), the label's logit (NaN until it
    /// is seen), and 1 where the first of the largest is the label's, else 0. `begin` forgets what was there. Rows that do
    /// not count (label −100, weight 0) have 0, 1, 0, 0.
    SoftmaxStats {
        logits: Operand,
        labels: Operand,
        weights: Operand,
        stats: Operand,
        rows: u64,
        first: u64,
        columns: u64,
        begin: bool,
    },
    /// Adds Σ weight · nll to the metrics, of rows whose stats are of the whole vocabulary; with `correct`, whether the
    /// largest logit was the label's.
    CrossEntropy {
        stats: Operand,
        labels: Operand,
        weights: Operand,
        metrics: Operand,
        correct: Option<Operand>,
        rows: u64,
    },
    /// `logits[R, columns]`, from column `first` of the vocabulary on, become the gradient of the loss (scaled by
    /// 1 / labelled tokens of the step).
    SoftmaxGrad {
        logits: Operand,
        labels: Operand,
        weights: Operand,
        stats: Operand,
        scalars: Operand,
        rows: u64,
        first: u64,
        columns: u64,
    },
    /// `into[n]` += Σ rows of `x[m,n]`.
    SumRows { x: Operand, into: Operand, workspace: Operand, rows: u64, columns: u64 },
    /// `out[D]` = the row of `x[N,D]` that the scalars name.
    PickRow { x: Operand, scalars: Operand, out: Operand, rows: u64, columns: u64 },
    /// into += x.
    Add { x: Operand, into: Operand, elements: u64 },
    /// `out[N,D]` = x with elements left out at random, the others divided by 1 − probability; or out += that. Which
    /// ones is a function of (seed, step, sample, layer, site, element), computed here: its gradient is the same op
    /// on the gradient.
    ///
    /// Row r is token t = r mod sequence of sample s = first_sample + r div sequence of the step; element e = t·D +
    /// column. Words: Philox-4x32-10 (as `InitNormal`) with counter (e div 4, layer · 256 + site, s, step) and key
    /// (low half of seed, high half of seed xor 0x44524F50). Element e has word e mod 4; it stays where word ≥
    /// ⌊probability · 2³²⌋. out = x · (1 / (1 − probability)), the factor rounded to the wide type; the sum is
    /// rounded once.
    Dropout {
        x: Operand,
        out: Operand,
        scalars: Operand,
        seed: u64,
        first_sample: Index,
        layer: Index,
        site: u8,
        probability: f64,
        rows: u64,
        columns: u64,
        sequence: u64,
        accumulate: bool,
    },
    /// All elements (a byte's value, where elements are bytes).
    Fill { into: Operand, value: f64, elements: u64 },
    /// Adds Σ x² to the metrics.
    SquaredNorm { x: Operand, metrics: Operand, workspace: Operand, elements: u64 },
    /// The scalar that gradients are multiplied with: min(1, clip / (norm + 1e-6)), as in PyTorch.
    ClipFactor { metrics: Operand, scalars: Operand },
    /// Decoupled weight decay (Loshchilov and Hutter), bias-corrected.
    AdamW {
        weight: Operand,
        gradient: Operand,
        first: Operand,
        second: Operand,
        scalars: Operand,
        elements: u64,
        betas: [f64; 2],
        eps: f64,
        decay: f64,
    },
    /// AdamW with block-wise 8-bit state. Elements b·256 .. b·256 + 256 of the tensor are a block with one scale for
    /// each moment (the last block may be shorter), all in f32:
    ///
    /// m = signed map\[first\] · first_scale, v = unsigned map\[second\] · second_scale; then m, v and the weight
    /// become what `AdamW` makes of them; first_scale = max |m|, second_scale = max v of the block; first and second
    /// = the codes of m · inverse(first_scale) and v · inverse(second_scale) ([`crate::formats`]).
    AdamW8 {
        weight: Operand,
        gradient: Operand,
        first: Operand,
        first_scale: Operand,
        second: Operand,
        second_scale: Operand,
        scalars: Operand,
        elements: u64,
        betas: [f64; 2],
        eps: f64,
        decay: f64,
    },
    /// Stochastic gradient descent, with momentum where there is a buffer for it.
    Sgd {
        weight: Operand,
        gradient: Operand,
        momentum_buffer: Option<Operand>,
        scalars: Operand,
        elements: u64,
        momentum: f64,
        decay: f64,
    },
    /// Element by element to another type.
    Cast { from: Operand, to: Operand, elements: u64 },
    /// Normal numbers, a function of (seed, number, first + element).
    InitNormal { into: Operand, seed: u64, number: u64, first: Index, std: f64, elements: u64 },
    /// Uniform numbers from −bound to bound, a function of (seed, number, first + element): word w of `InitNormal`'s
    /// generator becomes ((w + 0.5) / 2³² · 2 − 1) · bound in f64, rounded once. Element e has word e mod 4 of block
    /// e div 4.
    InitUniform { into: Operand, seed: u64, number: u64, first: Index, bound: f64, elements: u64 },
    /// Whole blocks of a matrix with rows of `columns` elements, into a coarse format. Widened or narrowed to f32
    /// first.
    Quantise { from: Operand, into: Quantised, elements: u64, columns: u64 },
    /// The elements of a quantised matrix, each rounded once to the type of `into`.
    Dequantise { from: Quantised, into: Operand, elements: u64, columns: u64 },
    /// Starts a copy between spaces; both ends live until the wait.
    TransferStart { from: Operand, to: Operand, elements: u64, sequence: u64 },
    /// The copy of that number is complete.
    TransferWait { from: Operand, to: Operand, elements: u64, sequence: u64 },
    /// Starts a collective.
    CollectiveStart(Exchange),
    /// The collective of that number is complete.
    CollectiveWait(Exchange),
}

/// Whether an op reads or writes a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mode {
    /// Only reads.
    Read,
    /// Writes every element without reading.
    Write,
    /// Reads and writes, or writes in part.
    Update,
}

/// A place that an op touches.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Access {
    /// Where.
    pub operand: Operand,
    /// How many elements from there on.
    pub elements: u64,
    /// How.
    pub mode: Mode,
}

/// How much an op computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// Floating-point operations in matrix products.
    pub product_flops: f64,
    /// The (m, n, k) of the product, or of each of the products inside attention.
    pub product_shape: Option<(u64, u64, u64)>,
    /// Other floating-point operations.
    pub other_flops: f64,
}

/// The places that an op touches.
pub type Accesses = SmallVec<[Access; 8]>;

impl Op {
    /// The name of the op's kind as it is written in plans.
    pub fn name(&self) -> &'static str {
        use OpKind::*;
        match &self.kind {
            Product { .. } => "product",
            Embed { .. } => "embed",
            EmbedGrad { .. } => "embed_grad",
            RmsNorm { .. } => "rms_norm",
            RmsNormGrad { .. } => "rms_norm_grad",
            HeadNorm { .. } => "head_norm",
            HeadNormGrad { .. } => "head_norm_grad",
            Rope { .. } => "rope",
            RopeTable { .. } => "rope_table",
            Attention { .. } => "attention",
            AttentionGrad { .. } => "attention_grad",
            CachedAttention { .. } => "cached_attention",
            AppendCache { .. } => "append_cache",
            SwiGlu { .. } => "swi_glu",
            SwiGluGrad { .. } => "swi_glu_grad",
            SoftmaxStats { .. } => "softmax_stats",
            CrossEntropy { .. } => "cross_entropy",
            SoftmaxGrad { .. } => "softmax_grad",
            SumRows { .. } => "sum_rows",
            PickRow { .. } => "pick_row",
            Add { .. } => "add",
            Dropout { .. } => "dropout",
            Fill { .. } => "fill",
            SquaredNorm { .. } => "squared_norm",
            ClipFactor { .. } => "clip_factor",
            AdamW { .. } => "adam_w",
            AdamW8 { .. } => "adam_w8",
            Sgd { .. } => "sgd",
            Cast { .. } => "cast",
            InitNormal { .. } => "init_normal",
            InitUniform { .. } => "init_uniform",
            Quantise { .. } => "quantise",
            Dequantise { .. } => "dequantise",
            TransferStart { .. } => "transfer_start",
            TransferWait { .. } => "transfer_wait",
            CollectiveStart(_) => "collective_start",
            CollectiveWait(_) => "collective_wait",
        }
    }

    /// Whether the op is done in a call for the last micro-batch of a step, or for one before it.
    pub fn runs(&self, last: bool) -> bool {
        match &self.kind {
            OpKind::CollectiveStart(exchange) | OpKind::CollectiveWait(exchange) => last || !exchange.last,
            _ => true,
        }
    }

    /// Every place the op touches. The elements of workspaces are the whole tensor's: `elements_of` knows them.
    pub fn accesses(&self, elements_of: &dyn Fn(TensorId) -> u64) -> Accesses {
        let mut list = SmallVec::new();
        self.each_access(elements_of, &mut |access| list.push(access));
        list
    }

    /// Tells `each` of them, in the same order.
    pub fn each_access(&self, elements_of: &dyn Fn(TensorId) -> u64, each: &mut dyn FnMut(Access)) {
        use Mode::{Read, Update, Write};
        let mut touch = |operand: Operand, elements: u64, mode: Mode| each(Access { operand, elements, mode });
        let scratch = |operand: &Operand| elements_of(operand.tensor);
        match &self.kind {
            OpKind::Product {
                a,
                b,
                out,
                bias,
                residual,
                workspace,
                m,
                n,
                k,
                a_transposed,
                a_stride,
                out_stride,
                accumulate,
                ..
            } => {
                let (rows, columns) = if *a_transposed { (k, m) } else { (m, k) };
                touch(*a, (rows - 1) * a_stride + columns, Read);
                touch(*b, k * n, Read);
                if let Some(bias) = bias {
                    touch(*bias, *n, Read);
                }
                if let Some(residual) = residual {
                    touch(*residual, m * n, Read);
                }
                let whole = !accumulate && out_stride == n;
                touch(*out, (m - 1) * out_stride + n, if whole { Write } else { Update });
                touch(*workspace, scratch(workspace), Write);
            }
            OpKind::Embed { tokens, table, out, rows, hidden, vocab } => {
                touch(*tokens, *rows, Read);
                touch(*table, vocab * hidden, Read);
                touch(*out, rows * hidden, Write);
            }
            OpKind::EmbedGrad { tokens, dout, dtable, workspace, rows, hidden, vocab } => {
                touch(*tokens, *rows, Read);
                touch(*dout, rows * hidden, Read);
                touch(*dtable, vocab * hidden, Update);
                touch(*workspace, scratch(workspace), Write);
            }
            OpKind::RmsNorm { x, weight, out, rstd, rows, dim, .. } => {
                touch(*x, rows * dim, Read);
                touch(*weight, *dim, Read);
                touch(*out, rows * dim, Write);
                touch(*rstd, *rows, Write);
            }
            OpKind::RmsNormGrad { x, weight, rstd, dout, dx, dweight, workspace, rows, dim, accumulate } => {
                touch(*x, rows * dim, Read);
                touch(*weight, *dim, Read);
                touch(*rstd, *rows, Read);
                touch(*dout, rows * dim, Read);
                touch(*dx, rows * dim, if *accumulate { Update } else { Write });
                if let Some(dweight) = dweight {
                    touch(*dweight, *dim, Update);
                }
                touch(*workspace, scratch(workspace), Write);
            }
            OpKind::HeadNorm { x, q_weight, k_weight, out, rstd, rows, shape, .. } => {
                touch(*x, rows * shape.columns(), Read);
                touch(*q_weight, shape.head_dim, Read);
                touch(*k_weight, shape.head_dim, Read);
                touch(*out, rows * shape.columns(), Write);
                touch(*rstd, rows * shape.rotated(), Write);
            }
            OpKind::HeadNormGrad { x, q_weight, k_weight, rstd, dx, dweights, workspace, rows, shape } => {
                touch(*x, rows * shape.columns(), Read);
                touch(*q_weight, shape.head_dim, Read);
                touch(*k_weight, shape.head_dim, Read);
                touch(*rstd, rows * shape.rotated(), Read);
                touch(*dx, rows * shape.columns(), Update);
                for dweight in dweights.iter().flatten() {
                    touch(*dweight, shape.head_dim, Update);
                }
                touch(*workspace, scratch(workspace), Write);
            }
            OpKind::Rope { qkv, table, positions, rows, table_rows, shape, .. } => {
                touch(*table, table_rows * shape.head_dim, Read);
                touch(*positions, *rows, Read);
                touch(*qkv, rows * shape.columns(), Update);
            }
            OpKind::RopeTable { table, table_rows, head_dim, .. } => touch(*table, table_rows * head_dim, Write),
            OpKind::Attention { qkv, document_start, out, stats, workspace, batch, sequence, shape } => {
                let rows = batch * sequence;
                touch(*qkv, rows * shape.columns(), Read);
                touch(*document_start, rows, Read);
                touch(*out, rows * shape.query_columns(), Write);
                touch(*stats, rows * shape.heads, Write);
                touch(*workspace, scratch(workspace), Write);
            }
            OpKind::AttentionGrad {
                qkv,
                out,
                dout,
                stats,
                document_start,
                dqkv,
                workspace,
                batch,
                sequence,
                shape,
            } => {
                let rows = batch * sequence;
                touch(*qkv, rows * shape.columns(), Read);
                touch(*out, rows * shape.query_columns(), Read);
                touch(*dout, rows * shape.query_columns(), Read);
                touch(*stats, rows * shape.heads, Read);
                touch(*document_start, rows, Read);
                touch(*dqkv, rows * shape.columns(), Write);
                touch(*workspace, scratch(workspace), Write);
            }
            OpKind::CachedAttention { qkv, keys, values, scalars, out, workspace, rows, capacity, shape } => {
                touch(*qkv, rows * shape.columns(), Read);
                touch(*keys, capacity * shape.kv_heads * shape.head_dim, Read);
                touch(*values, capacity * shape.kv_heads * shape.head_dim, Read);
                touch(*scalars, scratch(scalars), Read);
                touch(*out, rows * shape.query_columns(), Write);
                touch(*workspace, scratch(workspace), Write);
            }
            OpKind::AppendCache { qkv, keys, values, scalars, rows, capacity, shape } => {
                touch(*qkv, rows * shape.columns(), Read);
                touch(*scalars, scratch(scalars), Read);
                touch(*keys, capacity * shape.kv_heads * shape.head_dim, Update);
                touch(*values, capacity * shape.kv_heads * shape.head_dim, Update);
            }
            OpKind::SwiGlu { gate_up, out, rows, ffn } => {
                touch(*gate_up, rows * 2 * ffn, Read);
                touch(*out, rows * ffn, Write);
            }
            OpKind::SwiGluGrad { gate_up, dout, dgate_up, rows, ffn } => {
                touch(*gate_up, rows * 2 * ffn, Read);
                touch(*dout, rows * ffn, Read);
                touch(*dgate_up, rows * 2 * ffn, Write);
            }
            OpKind::SoftmaxStats { logits, labels, weights, stats, rows, columns, begin, .. } => {
                touch(*logits, rows * columns, Read);
                touch(*labels, *rows, Read);
                touch(*weights, *rows, Read);
                touch(*stats, rows * SOFTMAX_STATS, if *begin { Write } else { Update });
            }
            OpKind::CrossEntropy { stats, labels, weights, metrics, correct, rows } => {
                touch(*stats, rows * SOFTMAX_STATS, Read);
                touch(*labels, *rows, Read);
                touch(*weights, *rows, Read);
                touch(*metrics, scratch(metrics), Update);
                if let Some(correct) = correct {
                    touch(*correct, *rows, Write);
                }
            }
            OpKind::SoftmaxGrad { logits, labels, weights, stats, scalars, rows, columns, .. } => {
                touch(*logits, rows * columns, Update);
                touch(*labels, *rows, Read);
                touch(*weights, *rows, Read);
                touch(*stats, rows * SOFTMAX_STATS, Read);
                touch(*scalars, scratch(scalars), Read);
            }
            OpKind::SumRows { x, into, workspace, rows, columns } => {
                touch(*x, rows * columns, Read);
                touch(*into, *columns, Update);
                touch(*workspace, scratch(workspace), Write);
            }
            OpKind::PickRow { x, scalars, out, rows, columns } => {
                touch(*x, rows * columns, Read);
                touch(*scalars, scratch(scalars), Read);
                touch(*out, *columns, Write);
            }
            OpKind::Add { x, into, elements } => {
                touch(*x, *elements, Read);
                touch(*into, *elements, Update);
            }
            OpKind::Dropout { x, out, scalars, rows, columns, accumulate, .. } => {
                touch(*x, rows * columns, Read);
                touch(*scalars, scratch(scalars), Read);
                touch(*out, rows * columns, if *accumulate { Update } else { Write });
            }
            OpKind::Fill { into, elements, .. }
            | OpKind::InitNormal { into, elements, .. }
            | OpKind::InitUniform { into, elements, .. } => {
                touch(*into, *elements, Write);
            }
            OpKind::Quantise { from, into, elements, columns } => {
                touch(*from, *elements, Read);
                into.parts(*elements, *columns).into_iter().for_each(|(part, count)| touch(part, count, Write));
            }
            OpKind::Dequantise { from, into, elements, columns } => {
                from.parts(*elements, *columns).into_iter().for_each(|(part, count)| touch(part, count, Read));
                touch(*into, *elements, Write);
            }
            OpKind::SquaredNorm { x, metrics, workspace, elements } => {
                touch(*x, *elements, Read);
                touch(*metrics, scratch(metrics), Update);
                touch(*workspace, scratch(workspace), Write);
            }
            OpKind::ClipFactor { metrics, scalars } => {
                touch(*metrics, scratch(metrics), Read);
                touch(*scalars, scratch(scalars), Update);
            }
            OpKind::AdamW { weight, gradient, first, second, scalars, elements, .. } => {
                touch(*gradient, *elements, Read);
                touch(*scalars, scratch(scalars), Read);
                touch(*first, *elements, Update);
                touch(*second, *elements, Update);
                touch(*weight, *elements, Update);
            }
            OpKind::AdamW8 {
                weight, gradient, first, first_scale, second, second_scale, scalars, elements, ..
            } => {
                let blocks = elements.div_ceil(STATE_BLOCK);
                touch(*gradient, *elements, Read);
                touch(*scalars, scratch(scalars), Read);
                touch(*first, *elements, Update);
                touch(*first_scale, blocks, Update);
                touch(*second, *elements, Update);
                touch(*second_scale, blocks, Update);
                touch(*weight, *elements, Update);
            }
            OpKind::Sgd { weight, gradient, momentum_buffer, scalars, elements, .. } => {
                touch(*gradient, *elements, Read);
                touch(*scalars, scratch(scalars), Read);
                if let Some(buffer) = momentum_buffer {
                    touch(*buffer, *elements, Update);
                }
                touch(*weight, *elements, Update);
            }
            OpKind::Cast { from, to, elements } => {
                touch(*from, *elements, Read);
                touch(*to, *elements, Write);
            }
            OpKind::TransferStart { from, to, elements, .. } | OpKind::TransferWait { from, to, elements, .. } => {
                touch(*from, *elements, Read);
                touch(*to, *elements, Write);
            }
            OpKind::CollectiveStart(exchange) | OpKind::CollectiveWait(exchange) => {
                for piece in &exchange.pieces {
                    let (read, written) = exchange.elements(piece);
                    let adds = exchange.collective == Collective::ReduceScatter;
                    if piece.input == piece.output && read == written {
                        touch(piece.output, written, Update);
                        continue;
                    }
                    if read > 0 {
                        touch(piece.input, read, Read);
                    }
                    if written > 0 {
                        touch(piece.output, written, if adds { Update } else { Write });
                    }
                }
            }
        }
    }

    /// (read, written) operands that may stand in the same bytes when the read one dies here and
    /// both are equally large.
    pub fn in_place(&self) -> Option<(Operand, Operand)> {
        match &self.kind {
            OpKind::SwiGluGrad { gate_up, dgate_up, .. } => Some((*gate_up, *dgate_up)),
            OpKind::Product { residual: Some(residual), out, .. } => Some((*residual, *out)),
            _ => None,
        }
    }

    /// How much the op computes, the worst case where that depends on data.
    pub fn cost(&self) -> Cost {
        let flops = |product: u64, other: u64| Cost {
            product_flops: product as f64,
            product_shape: None,
            other_flops: other as f64,
        };
        match &self.kind {
            OpKind::Product { m, n, k, .. } => Cost {
                product_flops: 2.0 * (*m as f64) * (*n as f64) * (*k as f64),
                product_shape: Some((*m, *n, *k)),
                other_flops: 0.0,
            },
            OpKind::EmbedGrad { rows, hidden, .. } => flops(0, rows * hidden),
            OpKind::RmsNorm { rows, dim, .. } => flops(0, 4 * rows * dim),
            OpKind::RmsNormGrad { rows, dim, .. } => flops(0, 9 * rows * dim),
            OpKind::HeadNorm { rows, shape, .. } => flops(0, 4 * rows * shape.columns()),
            OpKind::HeadNormGrad { rows, shape, .. } => flops(0, 9 * rows * shape.columns()),
            OpKind::Rope { rows, shape, .. } => flops(0, 3 * rows * shape.rotated() * shape.head_dim),
            OpKind::RopeTable { table_rows, head_dim, .. } => flops(0, 40 * table_rows * head_dim),
            OpKind::Attention { batch, sequence, shape, .. } => {
                // Half of the T × T scores are visible; two products over them, and the softmax.
                let scores = batch * shape.heads * sequence * (sequence + 1) / 2;
                Cost {
                    product_shape: Some((64, *sequence, shape.head_dim)),
                    ..flops(4 * scores * shape.head_dim, 12 * scores)
                }
            }
            OpKind::AttentionGrad { batch, sequence, shape, .. } => {
                let scores = batch * shape.heads * sequence * (sequence + 1) / 2;
                Cost {
                    product_shape: Some((64, *sequence, shape.head_dim)),
                    ..flops(10 * scores * shape.head_dim, 14 * scores)
                }
            }
            OpKind::CachedAttention { rows, capacity, shape, .. } => {
                let scores = rows * capacity * shape.heads;
                Cost {
                    product_shape: Some((*rows, *capacity, shape.head_dim)),
                    ..flops(4 * scores * shape.head_dim, 12 * scores)
                }
            }
            OpKind::SwiGlu { rows, ffn, .. } => flops(0, 14 * rows * ffn),
            OpKind::SwiGluGrad { rows, ffn, .. } => flops(0, 20 * rows * ffn),
            OpKind::SoftmaxStats { rows, columns, .. } => flops(0, 12 * rows * columns),
            OpKind::CrossEntropy { rows, .. } => flops(0, 12 * rows),
            OpKind::SoftmaxGrad { rows, columns, .. } => flops(0, 14 * rows * columns),
            OpKind::SumRows { rows, columns, .. } => flops(0, rows * columns),
            OpKind::Add { elements, .. } => flops(0, *elements),
            OpKind::SquaredNorm { elements, .. } => flops(0, 2 * elements),
            OpKind::AdamW { elements, .. } => flops(0, 14 * elements),
            OpKind::AdamW8 { elements, .. } => flops(0, 40 * elements),
            OpKind::Sgd { elements, .. } => flops(0, 5 * elements),
            OpKind::Dropout { rows, columns, .. } => flops(0, 20 * rows * columns),
            OpKind::InitUniform { elements, .. } => flops(0, 20 * elements),
            OpKind::Quantise { elements, .. } => flops(0, 10 * elements),
            OpKind::Dequantise { elements, .. } => flops(0, 2 * elements),
            OpKind::InitNormal { elements, .. } => flops(0, 60 * elements),
            _ => Cost::default(),
        }
    }

    /// Bytes read and written, each place once (an update counts twice).
    pub fn bytes_moved(&self, elements_of: &dyn Fn(TensorId) -> u64, dtype_of: &dyn Fn(TensorId) -> DType) -> u64 {
        if matches!(self.kind, OpKind::TransferWait { .. } | OpKind::CollectiveWait(_)) {
            return 0;
        }
        let gathered = |access: &Access| match &self.kind {
            // Only the rows that tokens name are touched.
            OpKind::Embed { table, rows, hidden, .. } if access.operand == *table => rows * hidden,
            OpKind::EmbedGrad { dtable, rows, hidden, .. } if access.operand == *dtable => rows * hidden,
            OpKind::AppendCache { keys, values, rows, shape, .. }
                if access.operand == *keys || access.operand == *values =>
            {
                rows * shape.kv_heads * shape.head_dim
            }
            OpKind::PickRow { x, columns, .. } if access.operand == *x => *columns,
            // Only some columns of a wider matrix.
            OpKind::Product { a, m, k, .. } if access.operand == *a => m * k,
            OpKind::Product { out, m, n, .. } if access.operand == *out => m * n,
            _ => access.elements,
        };
        let mut bytes = 0;
        self.each_access(elements_of, &mut |access| {
            let times = if access.mode == Mode::Update { 2 } else { 1 };
            bytes += gathered(&access) * dtype_of(access.operand.tensor).bytes() * times;
        });
        bytes
    }
}
