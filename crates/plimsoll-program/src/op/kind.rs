//! The closed set of ops: [`OpKind`] with the operands and sizes of each op, its name, and its [`Family`] (the module
//! that describes it).

use super::{Exchange, Heads, Quantized};
use crate::models::{Activation, QkNorm, QueryGrowth, RopeScaling};
use crate::tensor::{Index, Operand};
use serde::{Deserialize, Serialize};

/// An operation with its operands and sizes.
///
/// Shape letters: N tokens of a micro-batch (B sequences × T tokens), D hidden, H heads, K kv heads, E head dim, F ffn,
/// V vocabulary, C = (H + 2K)·E columns of queries, keys and values side by side, P positions. Matrices are row-major;
/// weights are `[out, in]` as in Hugging Face files. Operands whose names start with `d` are gradients. A `workspace`
/// is a temporary buffer of the kernel; `scalars` and `metrics` are the small tensors of [`crate::scalars`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "fields are the letters of the legend, and operands named by role")]
pub enum OpKind {
    /// Matrix product: `out[m,n]` = scale·a·b (+ `bias[n]`) (+ `residual[m,n]`), or with `accumulate` out += scale·a·b.
    ///
    /// `a` is `[m,k]`, or `[k,m]` if transposed; `b` is `[k,n]`, or `[n,k]` if transposed. Rows of `a` as stored are
    /// `a_stride` elements apart, rows of `out` `out_stride`. A stride above the row length selects some columns of a
    /// wider matrix, such as the queries in the fused queries | keys | values.
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
    /// Embedding lookup: `out[N,D]` = `scale` · the rows of `table[V,D]` that `tokens[N]` select.
    Embed { tokens: Operand, table: Operand, out: Operand, rows: u64, hidden: u64, vocab: u64, scale: f64 },
    /// Gradient of [`OpKind::Embed`]: adds `scale` · each row of `dout[N,D]` to the row of `dtable[V,D]` that its token
    /// selects.
    EmbedGrad {
        tokens: Operand,
        dout: Operand,
        dtable: Operand,
        workspace: Operand,
        rows: u64,
        hidden: u64,
        vocab: u64,
        scale: f64,
    },
    /// RMS norm of each row: out = x / rms(x) · (weight + offset) (+ residual). `rstd[rows]` = 1 / rms(x). `offset` is 0,
    /// or 1 in Gemma.
    RmsNorm {
        x: Operand,
        weight: Operand,
        residual: Option<Operand>,
        out: Operand,
        rstd: Operand,
        rows: u64,
        dim: u64,
        eps: f64,
        offset: f64,
    },
    /// Gradient of [`OpKind::RmsNorm`]: writes `dx` or, with `accumulate`, adds to it. Adds the weight's gradient to
    /// `dweight`, which is `None` for a frozen weight. The gradient of a residual is `dout` itself.
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
        offset: f64,
        accumulate: bool,
    },
    /// RMS norms of queries and keys: of each head (Qwen 3), or of all query heads and of all key heads (OLMo 2). A row
    /// of `x[N,C]` has queries, keys and values side by side; the values are copied. `rstd[N, H+K]`, or `[N, 2]`, has
    /// 1 / rms of each norm, and `offset` is added to the weights.
    HeadNorm {
        x: Operand,
        q_weight: Operand,
        k_weight: Operand,
        out: Operand,
        rstd: Operand,
        rows: u64,
        shape: Heads,
        norm: QkNorm,
        eps: f64,
        offset: f64,
    },
    /// Gradient of [`OpKind::HeadNorm`]: replaces the gradient of the output in `dx` by that of the input. Adds the
    /// gradients of the two weights to `dweights` (queries, keys), which is `None` for frozen weights.
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
        norm: QkNorm,
        offset: f64,
    },
    /// Rotary positions: rotates query and key heads of `qkv[N,C]` in place, each row by its entry in `positions[N]`.
    /// Row p of `table[P,E]` has the cosines, then the sines of position p. The rows of keys lie `key_shift` rows behind
    /// those of queries. `inverse` rotates back, which is the gradient.
    Rope {
        qkv: Operand,
        table: Operand,
        positions: Operand,
        rows: u64,
        table_rows: u64,
        key_shift: u64,
        shape: Heads,
        inverse: bool,
    },
    /// Computes the `table[P,E]` of cosines and sines, times `amplitude` and the factor of `growth`, that [`OpKind::Rope`]
    /// reads.
    RopeTable {
        table: Operand,
        table_rows: u64,
        head_dim: u64,
        theta: f64,
        scaling: RopeScaling,
        amplitude: f64,
        growth: Option<QueryGrowth>,
    },
    /// Causal attention within documents, of which a sequence may hold several (packing): query i attends to keys
    /// `document_start[i] ..= i`. Reads `qkv[N,C]`, writes `out[N, H·E]` and `stats[B,H,T]`, the log-sum-exp of the
    /// scores. A score s is q · k / √E, or softcap · tanh(s / softcap) with a `softcap`.
    Attention {
        qkv: Operand,
        document_start: Operand,
        out: Operand,
        stats: Operand,
        workspace: Operand,
        batch: u64,
        sequence: u64,
        shape: Heads,
        softcap: Option<f64>,
    },
    /// Gradient of [`OpKind::Attention`]: writes the gradients of queries, keys and values to `dqkv[N,C]`.
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
        softcap: Option<f64>,
    },
    /// Moves positions: `out[N]` = document_start + max(0, positions + shift), of integers. A shift of 1 − window gives
    /// the first key that each token sees through a sliding window; one below all negated positions gives
    /// `document_start`. Without `document_start`, documents start at 0, as in generation.
    ShiftPositions { positions: Operand, document_start: Option<Operand>, out: Operand, rows: u64, shift: i32 },
    /// Attention of `rows` new tokens of each of `sequences` sequences over their key-value caches, to which the keys and
    /// values of the new tokens have been written. `keys` and `values` hold `slots` caches of `capacity` tokens one after
    /// another. `places[sequences · rows]` are the rows of the new tokens in them: slot · `capacity` + position. Those of
    /// a sequence are consecutive. A token sees the cache of its slot up to its own place.
    ///
    /// `first_keys[sequences · rows]`, if given, has the position of the first token of its sequence that each new token sees.
    CachedAttention {
        qkv: Operand,
        keys: Operand,
        values: Operand,
        places: Operand,
        first_keys: Option<Operand>,
        out: Operand,
        workspace: Operand,
        slots: u64,
        sequences: u64,
        rows: u64,
        capacity: u64,
        shape: Heads,
        softcap: Option<f64>,
    },
    /// Writes keys and values of `rows` tokens of each of `sequences` sequences to their key-value caches, at `places`.
    /// Operands are those of [`OpKind::CachedAttention`].
    AppendCache {
        qkv: Operand,
        keys: Operand,
        values: Operand,
        places: Operand,
        slots: u64,
        sequences: u64,
        rows: u64,
        capacity: u64,
        shape: Heads,
    },
    /// Copies `rows` rows (tokens) of the key-value caches `keys` and `values`, from the rows that `from` names to those that
    /// `to` names. No row is copied from and copied to. A negative target means that nothing is copied.
    CopyCache {
        keys: Operand,
        values: Operand,
        from: Operand,
        to: Operand,
        slots: u64,
        capacity: u64,
        rows: u64,
        shape: Heads,
    },
    /// Gated unit (SwiGLU, GeGLU): `out[N,F]` = activation(gate) · up, elementwise. Each row of `gate_up[N,2F]` has gate,
    /// then up.
    Glu { gate_up: Operand, out: Operand, rows: u64, ffn: u64, activation: Activation },
    /// Gradient of [`OpKind::Glu`]: writes `dgate_up[N,2F]`, which may be the same memory as `gate_up`.
    GluGrad { gate_up: Operand, dout: Operand, dgate_up: Operand, rows: u64, ffn: u64, activation: Activation },
    /// Limits elements to ±`cap` smoothly, in place: x = cap · tanh(x / cap).
    SoftCap { x: Operand, elements: u64, cap: f64 },
    /// Updates the running softmax of R rows (tokens) with one block of the vocabulary: `logits[R, columns]`, of which
    /// the first column is vocabulary entry `first`. All blocks together give the cross entropy without full logits.
    ///
    /// `stats[R, 4]` holds the largest logit, Σ e^(x − largest), the label's logit (NaN before its block), and 1 if the
    /// first largest logit is the label's, else 0. `begin` marks the first block. Ignored rows (label −100 or weight 0)
    /// have 0, 1, 0, 0.
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
    /// Adds the loss Σ weight · negative log-likelihood of `rows` tokens to the metrics tensor. It reads the `stats`
    /// that [`OpKind::SoftmaxStats`] has computed over the full vocabulary. `weights` are loss weights per token.
    ///
    /// If `correct` is given, writes to it for each token whether its label had the largest logit. If `log_probabilities`
    /// is given, writes to it the log-probability of each token's label; 0 for tokens without loss.
    CrossEntropy {
        stats: Operand,
        labels: Operand,
        weights: Operand,
        metrics: Operand,
        correct: Option<Operand>,
        log_probabilities: Option<Operand>,
        rows: u64,
    },
    /// Replaces `logits[R, columns]`, of which the first column is vocabulary entry `first`, by the gradient of the
    /// loss. The gradient is scaled by the loss weight of each token and by 1 / labelled tokens of the step. Logits that
    /// [`OpKind::SoftCap`] limited to ±`softcap` are replaced by the gradient of what it read.
    SoftmaxGrad {
        logits: Operand,
        labels: Operand,
        weights: Operand,
        stats: Operand,
        scalars: Operand,
        rows: u64,
        first: u64,
        columns: u64,
        softcap: Option<f64>,
    },
    /// Sum over rows: `into[n]` += Σ rows of `x[m,n]`; the gradient of a bias.
    SumRows { x: Operand, into: Operand, workspace: Operand, rows: u64, columns: u64 },
    /// Selects one token in generation: `out[D]` = the row of `x[N,D]` with number [`crate::scalars::Scalar::LastRow`].
    PickRow { x: Operand, scalars: Operand, out: Operand, rows: u64, columns: u64 },
    /// Elementwise sum: into += x.
    Add { x: Operand, into: Operand, elements: u64 },
    /// Dropout: `out[N,D]` = x with random elements zeroed and the others divided by 1 − probability; with
    /// `accumulate`, out += that.
    ///
    /// The choice is a function of (seed, step, sample, layer, site, element), so that the gradient is the same op
    /// applied to the gradient. A sample is a sequence, numbered within the step; a site is an input of the layer.
    ///
    /// Row r is token t = r mod sequence of sample s = first_sample + r div sequence of the step; element e = t·D +
    /// column. Words: Philox-4x32-10 (as `InitNormal`) with counter (e div 4, layer · 256 + site, s, step) and key
    /// (low half of seed, high half of seed xor 0x44524F50). Element e has word e mod 4; it is kept if word ≥
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
    /// Sets all elements to `value`.
    Fill { into: Operand, value: f64, elements: u64 },
    /// Adds Σ x² of a gradient to [`crate::scalars::Metric::NormSquared`].
    SquaredNorm { x: Operand, metrics: Operand, workspace: Operand, elements: u64 },
    /// Computes [`crate::scalars::Scalar::ClipFactor`] from the norm of all gradients: min(1, clip / (norm + 1e-6)), as
    /// in `clip_grad_norm_`.
    ClipFactor { metrics: Operand, scalars: Operand },
    /// AdamW update of `weight` and of its `first` and `second` moments, with bias correction and decoupled weight
    /// decay (Loshchilov and Hutter, 2019). Learning rate, bias corrections and clip factor are in `scalars`.
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
    /// AdamW update with block-wise 8-bit moments (8-bit Adam of bitsandbytes). Elements b·256 .. b·256 + 256 form a
    /// block with one scale per moment; the last block may be shorter. All arithmetic is f32:
    ///
    /// 1. m = signed map\[first\] · first_scale, v = unsigned map\[second\] · second_scale.
    /// 2. m, v and the weight are updated as in [`OpKind::AdamW`].
    /// 3. first_scale = max |m| and second_scale = max v of the block; first and second = the codes of
    ///    m · inverse(first_scale) and v · inverse(second_scale) ([`crate::formats`]).
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
    /// Stochastic gradient descent, as in `torch.optim.SGD`; without momentum if `momentum_buffer` is `None`. Learning
    /// rate and clip factor are in `scalars`.
    Sgd {
        weight: Operand,
        gradient: Operand,
        momentum_buffer: Option<Operand>,
        scalars: Operand,
        elements: u64,
        momentum: f64,
        decay: f64,
    },
    /// Copies elements and converts them to the dtype of `to`.
    Cast { from: Operand, to: Operand, elements: u64 },
    /// Fills a piece of a parameter with normal random numbers of standard deviation `std`. Element e is a function of
    /// (`seed`, `number` of the parameter, `first` + e), so that pieces may be filled in any order.
    InitNormal { into: Operand, seed: u64, number: u64, first: Index, std: f64, elements: u64 },
    /// Fills a piece of a parameter with uniform random numbers from −`bound` to `bound`. Element e is a function of
    /// (`seed`, `number` of the parameter, `first` + e).
    ///
    /// Word w of `InitNormal`'s generator becomes ((w + 0.5) / 2³² · 2 − 1) · bound in f64, rounded once. Element e has
    /// word e mod 4 of block e div 4.
    InitUniform { into: Operand, seed: u64, number: u64, first: Index, bound: f64, elements: u64 },
    /// Quantizes `elements` elements of a matrix with rows of `columns` elements, after a conversion to f32. The
    /// elements start at a quantization block, and end with one or with the matrix.
    Quantize { from: Operand, into: Quantized, elements: u64, columns: u64 },
    /// Dequantizes `elements` elements of an int8 or nf4 matrix with rows of `columns` elements. Each element is
    /// rounded once to the dtype of `into`.
    Dequantize { from: Quantized, into: Operand, elements: u64, columns: u64 },
    /// Starts an asynchronous copy between memory spaces: device, host, scratch file, model and checkpoint files. The
    /// [`OpKind::TransferWait`] with the same `sequence` number waits for it. Until then both tensors stay allocated.
    TransferStart { from: Operand, to: Operand, elements: u64, sequence: u64 },
    /// Waits until the copy that [`OpKind::TransferStart`] started with the same `sequence` number is complete.
    TransferWait { from: Operand, to: Operand, elements: u64, sequence: u64 },
    /// Starts a collective, a send or a receive between the workers of a team, asynchronously.
    CollectiveStart(Exchange),
    /// Waits until the collective, send or receive that was started with the same sequence number is complete.
    CollectiveWait(Exchange),
}

/// A group of similar ops. The module of [`crate::op`] with the family's name describes their accesses, cost and
/// operand types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Matrix products.
    Matmul,
    /// Token embeddings and their gradient.
    Embedding,
    /// RMS norms of rows and of heads, with their gradients.
    Norm,
    /// Attention, its gradient and its cache, and rotary embeddings.
    Attention,
    /// Softmax statistics, cross entropy and the gradient of logits.
    Loss,
    /// Activations, dropout, additions, casts, sums and copies of rows.
    Elementwise,
    /// Constants and random numbers.
    Fill,
    /// Quantization and dequantization.
    Quantization,
    /// Optimizer updates, gradient norms and clipping.
    Optimizer,
    /// Copies between memory spaces.
    Transfer,
    /// Collectives, sends and receives.
    Collective,
}

impl OpKind {
    /// Returns the op's name (such as `rms_norm_grad`) and its family.
    const fn name_and_family(&self) -> (&'static str, Family) {
        match self {
            OpKind::Product { .. } => ("product", Family::Matmul),
            OpKind::Embed { .. } => ("embed", Family::Embedding),
            OpKind::EmbedGrad { .. } => ("embed_grad", Family::Embedding),
            OpKind::RmsNorm { .. } => ("rms_norm", Family::Norm),
            OpKind::RmsNormGrad { .. } => ("rms_norm_grad", Family::Norm),
            OpKind::HeadNorm { .. } => ("head_norm", Family::Norm),
            OpKind::HeadNormGrad { .. } => ("head_norm_grad", Family::Norm),
            OpKind::Rope { .. } => ("rope", Family::Attention),
            OpKind::RopeTable { .. } => ("rope_table", Family::Attention),
            OpKind::Attention { .. } => ("attention", Family::Attention),
            OpKind::AttentionGrad { .. } => ("attention_grad", Family::Attention),
            OpKind::ShiftPositions { .. } => ("shift_positions", Family::Attention),
            OpKind::CachedAttention { .. } => ("cached_attention", Family::Attention),
            OpKind::AppendCache { .. } => ("append_cache", Family::Attention),
            OpKind::CopyCache { .. } => ("copy_cache", Family::Attention),
            OpKind::Glu { .. } => ("glu", Family::Elementwise),
            OpKind::GluGrad { .. } => ("glu_grad", Family::Elementwise),
            OpKind::SoftCap { .. } => ("soft_cap", Family::Elementwise),
            OpKind::SoftmaxStats { .. } => ("softmax_stats", Family::Loss),
            OpKind::CrossEntropy { .. } => ("cross_entropy", Family::Loss),
            OpKind::SoftmaxGrad { .. } => ("softmax_grad", Family::Loss),
            OpKind::SumRows { .. } => ("sum_rows", Family::Elementwise),
            OpKind::PickRow { .. } => ("pick_row", Family::Elementwise),
            OpKind::Add { .. } => ("add", Family::Elementwise),
            OpKind::Dropout { .. } => ("dropout", Family::Elementwise),
            OpKind::Fill { .. } => ("fill", Family::Fill),
            OpKind::SquaredNorm { .. } => ("squared_norm", Family::Optimizer),
            OpKind::ClipFactor { .. } => ("clip_factor", Family::Optimizer),
            OpKind::AdamW { .. } => ("adam_w", Family::Optimizer),
            OpKind::AdamW8 { .. } => ("adam_w8", Family::Optimizer),
            OpKind::Sgd { .. } => ("sgd", Family::Optimizer),
            OpKind::Cast { .. } => ("cast", Family::Elementwise),
            OpKind::InitNormal { .. } => ("init_normal", Family::Fill),
            OpKind::InitUniform { .. } => ("init_uniform", Family::Fill),
            OpKind::Quantize { .. } => ("quantize", Family::Quantization),
            OpKind::Dequantize { .. } => ("dequantize", Family::Quantization),
            OpKind::TransferStart { .. } => ("transfer_start", Family::Transfer),
            OpKind::TransferWait { .. } => ("transfer_wait", Family::Transfer),
            OpKind::CollectiveStart(_) => ("collective_start", Family::Collective),
            OpKind::CollectiveWait(_) => ("collective_wait", Family::Collective),
        }
    }

    /// Returns the op's name, such as `rms_norm_grad`, which plans, messages and measured rates use.
    pub(super) const fn name(&self) -> &'static str {
        self.name_and_family().0
    }

    /// Returns the family of the op, whose module describes its accesses, cost and operand types.
    pub const fn family(&self) -> Family {
        self.name_and_family().1
    }
}

/// Panics because the module of an op's family has no arm for the op.
///
/// # Panics
/// Always.
pub fn not_in_family(op: &OpKind) -> ! {
    panic!("the module of {:?} does not describe `{}`", op.family(), op.name())
}
