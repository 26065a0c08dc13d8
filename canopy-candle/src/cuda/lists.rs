//! Small lists of integers that ops take as host slices (positions, cache rows): put there once for all layers of a pass ([`with`]), else
//! uploaded when they are asked for.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::DeviceSlice;
use candle_core::{CudaDevice, Result};
use canopy_kernels::cuda::{DeviceList, Words};

use super::memory;
use crate::check::arg;
use crate::recorded::List;
use crate::wrap::WrapKernelErr;

/// Lists kept that no pass put there: the layers of a pass ask for the same ones.
const KEPT: usize = 16;

struct Kept {
    host: Vec<i32>,
    on_device: DeviceList<i32>,
}

static RECENT: Mutex<VecDeque<Kept>> = Mutex::new(VecDeque::new());

/// A list that is on the device for the duration of a pass.
#[derive(Clone, Debug)]
pub(crate) struct Placed {
    pub what: List,
    pub host: Arc<[i32]>,
    pub on_device: DeviceList<i32>,
}

impl Placed {
    /// A copy on the host.
    pub(crate) fn read(&self) -> Result<Vec<i32>> {
        let len = self.host.len();
        self.on_device.stream().clone_dtoh(&self.on_device.first(len)).w()
    }
}

thread_local!(static PLACED: RefCell<Vec<Placed>> = const { RefCell::new(Vec::new()) });

/// Runs `work`, whose ops on this thread find `lists` on the device.
pub(crate) fn with<T>(lists: Vec<Placed>, work: impl FnOnce() -> T) -> T {
    /// Restores what was there before.
    struct Restore(Vec<Placed>);
    impl Drop for Restore {
        fn drop(&mut self) {
            PLACED.set(std::mem::take(&mut self.0));
        }
    }
    let _restore = Restore(PLACED.replace(lists));
    work()
}

/// `values` on the device's stream, without a copy when the pass put them there or they are among the lists last asked for. Never written
/// to while an op reads them.
///
/// # Errors
/// From the driver; in a pass that is recorded, a list that the pass did not put there, since a later run could not replace it.
pub(crate) fn on_device(device: &CudaDevice, what: List, values: &[i32]) -> Result<DeviceList<i32>> {
    let placed = PLACED.with_borrow(|lists| {
        let found = lists.iter().find(|placed| placed.what == what && *placed.host == *values);
        found.map(|placed| placed.on_device.clone())
    });
    if let Some(placed) = placed {
        return Ok(placed);
    }
    if memory::is_recording() {
        return arg("recorded pass", "lists").refuse(format_args!("{what:?} placed"), format_args!("none"));
    }
    let stream = device.cuda_stream();
    let mut recent = RECENT.lock().expect("no holder of this lock panics");
    let same = |kept: &Kept| Arc::ptr_eq(kept.on_device.stream(), &stream) && kept.host == values;
    if let Some(place) = recent.iter().position(same) {
        let found = recent[place].on_device.clone();
        recent.swap(0, place);
        return Ok(found);
    }
    let mut words = Words::default();
    let place = words.push(values.iter().copied(), values.len());
    let on_device = DeviceList::new(&words.upload(&stream).wrap()?, place);
    recent.truncate(KEPT - 1);
    recent.push_front(Kept { host: values.to_vec(), on_device: on_device.clone() });
    Ok(on_device)
}
