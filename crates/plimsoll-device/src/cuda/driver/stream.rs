//! Streams and events.

use super::{Address, Context, Driver, EVENT_DISABLE_TIMING, Function, Handle, NOT_READY, STREAM_NON_BLOCKING};
use crate::error::CudaError;
use std::ffi::{c_uint, c_void};
use std::ptr;
use std::sync::Arc;

/// A CUDA stream, whose work runs in order.
pub struct Stream {
    context: Arc<Context>,
    handle: Handle,
}

// SAFETY: as for `Context`; a stream belongs to no thread.
unsafe impl Send for Stream {}

impl Stream {
    /// Creates a stream that does not synchronize with the default stream.
    ///
    /// # Errors
    /// Fails if the driver refuses.
    pub fn new(context: &Arc<Context>) -> Result<Stream, CudaError> {
        let driver = context.driver();
        // SAFETY: writes one handle.
        let make = |stream: *mut Handle| unsafe { (driver.cuStreamCreate)(stream, STREAM_NON_BLOCKING) };
        Ok(Stream { handle: driver.get("create a stream", make)?, context: context.clone() })
    }

    /// Returns the driver's handle of the stream, for calls to cuBLASLt and NCCL.
    pub(in crate::cuda) fn handle(&self) -> *mut c_void {
        self.handle
    }

    fn driver(&self) -> &Driver {
        self.context.driver()
    }

    /// Waits until all work on the stream completes.
    ///
    /// # Errors
    /// Returns a failure of the device.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the stream lives.
        self.driver().check("finish a stream", unsafe { (self.driver().cuStreamSynchronize)(self.handle) })
    }

    /// Makes later work of the stream wait for `event`.
    ///
    /// # Errors
    /// Fails if the driver refuses.
    pub fn wait(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both live; the stream copies the wait during the call.
        let waited = unsafe { (self.driver().cuStreamWaitEvent)(self.handle, event.handle, 0) };
        self.driver().check("wait for an event", waited)
    }

    /// Enqueues a copy from host to device.
    ///
    /// # Safety
    /// `from` stays valid and unchanged, and `to` untouched by others, until the stream has completed the copy.
    pub unsafe fn copy_in(&self, to: Address, from: *const u8, bytes: u64) -> Result<(), CudaError> {
        // SAFETY: as the caller promises.
        let done = unsafe { (self.driver().cuMemcpyHtoDAsync_v2)(to, from.cast(), bytes as usize, self.handle) };
        self.driver().check("copy to the device", done)
    }

    /// Enqueues a copy from device to host.
    ///
    /// # Safety
    /// `to` stays valid and unread, and `from` unwritten by others, until the stream has completed the copy.
    pub unsafe fn copy_out(&self, to: *mut u8, from: Address, bytes: u64) -> Result<(), CudaError> {
        // SAFETY: as the caller promises.
        let done = unsafe { (self.driver().cuMemcpyDtoHAsync_v2)(to.cast(), from, bytes as usize, self.handle) };
        self.driver().check("copy from the device", done)
    }

    /// Enqueues a copy within the device.
    ///
    /// # Safety
    /// Both ranges are device memory, and free for this use until the stream has completed the copy.
    pub unsafe fn copy(&self, to: Address, from: Address, bytes: u64) -> Result<(), CudaError> {
        // SAFETY: as the caller promises.
        let done = unsafe { (self.driver().cuMemcpyDtoDAsync_v2)(to, from, bytes as usize, self.handle) };
        self.driver().check("copy on the device", done)
    }

    /// Enqueues a fill with a two-byte pattern.
    ///
    /// # Safety
    /// The range is device memory with an even address and size, and free for this use until the stream has completed
    /// the fill.
    pub unsafe fn fill(&self, to: Address, value: u16, bytes: u64) -> Result<(), CudaError> {
        if bytes < 2 {
            return Ok(());
        }
        // SAFETY: as the caller promises.
        let done = unsafe { (self.driver().cuMemsetD16Async)(to, value, bytes as usize / 2, self.handle) };
        self.driver().check("fill memory", done)
    }

    /// Enqueues a fill with zeros.
    ///
    /// # Safety
    /// The range is device memory, and free for this use until the stream has completed the fill.
    pub unsafe fn zero(&self, to: Address, bytes: u64) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: as the caller promises.
        let done = unsafe { (self.driver().cuMemsetD8Async)(to, 0, bytes as usize, self.handle) };
        self.driver().check("fill memory", done)
    }

    /// Enqueues a kernel with `grid` blocks of `block` threads.
    ///
    /// # Safety
    /// `arguments` point to values of the types in the kernel's signature, in its order. The memory that the kernel
    /// touches is device memory, and free for this use until the stream has completed it.
    pub unsafe fn launch(
        &self,
        function: Function,
        grid: [u32; 3],
        block: u32,
        shared_bytes: u32,
        arguments: &[*const c_void],
    ) -> Result<(), CudaError> {
        let [x, y, z] = grid;
        let arguments = arguments.as_ptr().cast_mut().cast::<*mut c_void>();
        // SAFETY: as the caller promises; the driver copies the arguments before it returns, and writes to none.
        let launched = unsafe {
            let launch = self.driver().cuLaunchKernel;
            launch(function.handle, x, y, z, block, 1, 1, shared_bytes, self.handle, arguments, ptr::null_mut())
        };
        self.driver().check_with(launched, || format!("start {}", function.name).into())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: owned here, and not used after this; enqueued work still completes.
        unsafe { (self.driver().cuStreamDestroy_v2)(self.handle) };
    }
}

/// A point in a stream that other streams and the host can wait for.
pub struct Event {
    context: Arc<Context>,
    handle: Handle,
}

// SAFETY: as for `Stream`.
unsafe impl Send for Event {}

impl Event {
    /// Creates an event that records no time.
    ///
    /// # Errors
    /// Fails if the driver refuses.
    pub fn new(context: &Arc<Context>) -> Result<Event, CudaError> {
        Event::with_flags(context, EVENT_DISABLE_TIMING)
    }

    /// Creates an event that also records the time at which the stream reaches it ([`Event::seconds_since`]).
    ///
    /// # Errors
    /// Fails if the driver refuses.
    pub fn timed(context: &Arc<Context>) -> Result<Event, CudaError> {
        Event::with_flags(context, 0)
    }

    fn with_flags(context: &Arc<Context>, flags: c_uint) -> Result<Event, CudaError> {
        let driver = context.driver();
        // SAFETY: writes one handle.
        let handle =
            driver.get("create an event", |event: *mut Handle| unsafe { (driver.cuEventCreate)(event, flags) })?;
        Ok(Event { context: context.clone(), handle })
    }

    /// Records the event at the present end of the stream. An event that was never recorded counts as complete.
    ///
    /// # Errors
    /// Fails if the driver refuses.
    pub fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        let driver = self.context.driver();
        // SAFETY: both live.
        driver.check("record an event", unsafe { (driver.cuEventRecord)(self.handle, stream.handle) })
    }

    /// Blocks the host until the stream reaches the event.
    ///
    /// # Errors
    /// Returns a failure of the device.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let driver = self.context.driver();
        // SAFETY: the event lives.
        driver.check("wait for an event", unsafe { (driver.cuEventSynchronize)(self.handle) })
    }

    /// Returns whether the stream has reached the event.
    ///
    /// # Errors
    /// Returns a failure of the device.
    pub fn is_complete(&self) -> Result<bool, CudaError> {
        let driver = self.context.driver();
        // SAFETY: the event lives.
        match unsafe { (driver.cuEventQuery)(self.handle) } {
            NOT_READY => Ok(false),
            status => driver.check("wait for an event", status).map(|()| true),
        }
    }

    /// Returns the seconds from `start` to this event. Both events must be timed, recorded and complete.
    ///
    /// # Errors
    /// Fails if one of the events is not.
    pub fn seconds_since(&self, start: &Event) -> Result<f64, CudaError> {
        let driver = self.context.driver();
        // SAFETY: writes one float; both events live.
        let ask = |time: *mut f32| unsafe { (driver.cuEventElapsedTime)(time, start.handle, self.handle) };
        driver.get("report the time between events", ask).map(|milliseconds| f64::from(milliseconds) / 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: owned here, and not used after this.
        unsafe { (self.context.driver().cuEventDestroy_v2)(self.handle) };
    }
}
