//! Head counts and widths of the layers, checked once.

use crate::error::{Error, Result, expect_len};

fn positive(op: &'static str, arg: &'static str, value: usize) -> Result<()> {
    if value > 0 {
        return Ok(());
    }
    Err(Error::Value { op, arg, expected: "at least 1".into(), got: value.to_string() })
}

/// Sizes of one Gated DeltaNet layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GdnDims {
    /// Hk, heads of q and k.
    pub k_heads: usize,
    /// Hv, heads of v; a multiple of `k_heads`. Value head h uses key head h / (Hv / Hk).
    pub v_heads: usize,
    /// Dk, width of a key head.
    pub dk: usize,
    /// Dv, width of a value head.
    pub dv: usize,
}

impl GdnDims {
    /// Checks that every size is positive and that the key heads divide the value heads.
    pub fn new(k_heads: usize, v_heads: usize, dk: usize, dv: usize) -> Result<Self> {
        for (arg, value) in [("k_heads", k_heads), ("v_heads", v_heads), ("dk", dk), ("dv", dv)] {
            positive("gdn dims", arg, value)?;
        }
        if !v_heads.is_multiple_of(k_heads) {
            let expected = format!("a multiple of k_heads = {k_heads}");
            return Err(Error::Value { op: "gdn dims", arg: "v_heads", expected, got: v_heads.to_string() });
        }
        Ok(Self { k_heads, v_heads, dk, dv })
    }

    /// Channels of one packed qkv row: `2 Hk Dk + Hv Dv`.
    pub fn qkv_width(self) -> usize {
        2 * self.k_heads * self.dk + self.v_heads * self.dv
    }

    /// Elements of one slot's recurrent state: `Hv Dv Dk`.
    pub fn state_len(self) -> usize {
        self.v_heads * self.dv * self.dk
    }

    /// Slots of a state pool with `elements` elements.
    ///
    /// # Errors
    /// [`Error::Shape`] naming `state` when they are not whole slots; [`Error::Value`] when a size is 0 or the key heads
    /// do not divide the value heads.
    pub(crate) fn pool_slots(self, op: &'static str, elements: usize) -> Result<usize> {
        Self::new(self.k_heads, self.v_heads, self.dk, self.dv)?;
        let slots = elements / self.state_len();
        expect_len(op, "state", &[slots, self.v_heads, self.dv, self.dk], elements)?;
        Ok(slots)
    }

    /// The key head that value head `v_head` reads.
    pub fn key_head(self, v_head: usize) -> usize {
        v_head / (self.v_heads / self.k_heads)
    }

    /// q's factor after its L2 norm: `Dk^-1/2`.
    pub fn scale(self) -> f32 {
        (self.dk as f32).powf(-0.5)
    }
}

/// Sizes of the depthwise causal convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvDims {
    /// C, channels.
    pub channels: usize,
}

impl ConvDims {
    /// Taps of the kernel; the conv state holds one row fewer.
    pub const WIDTH: usize = 4;
    /// Rows of the conv state.
    pub const STATE_ROWS: usize = Self::WIDTH - 1;

    /// Checks that there is a channel.
    pub fn new(channels: usize) -> Result<Self> {
        positive("conv dims", "channels", channels)?;
        Ok(Self { channels })
    }

    /// Elements of one slot's conv state: `3 C`.
    pub fn state_len(self) -> usize {
        Self::STATE_ROWS * self.channels
    }
}

/// Sizes of an attention layer with grouped KV heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttnDims {
    /// Hq, query heads; a multiple of `kv_heads`. Query head h uses KV head h / (Hq / Hkv).
    pub q_heads: usize,
    /// Hkv, key and value heads.
    pub kv_heads: usize,
    /// D, width of a head.
    pub head_dim: usize,
}

impl AttnDims {
    /// Checks that every size is positive and that the KV heads divide the query heads.
    pub fn new(q_heads: usize, kv_heads: usize, head_dim: usize) -> Result<Self> {
        for (arg, value) in [("q_heads", q_heads), ("kv_heads", kv_heads), ("head_dim", head_dim)] {
            positive("attention dims", arg, value)?;
        }
        if !q_heads.is_multiple_of(kv_heads) {
            let expected = format!("a multiple of kv_heads = {kv_heads}");
            return Err(Error::Value {
                op: "attention dims",
                arg: "q_heads",
                expected,
                got: q_heads.to_string(),
            });
        }
        Ok(Self { q_heads, kv_heads, head_dim })
    }

    /// Elements of one query row: `Hq D`.
    pub fn q_width(self) -> usize {
        self.q_heads * self.head_dim
    }

    /// Elements of one key or value row: `Hkv D`.
    pub fn kv_width(self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// The KV head that query head `q_head` reads.
    pub fn kv_head(self, q_head: usize) -> usize {
        q_head / (self.q_heads / self.kv_heads)
    }

    /// Factor of the scores: `D^-1/2`.
    pub fn scale(self) -> f32 {
        (self.head_dim as f32).powf(-0.5)
    }
}
