import torch, cadam, cProfile, pstats, time, sys
sys.path.insert(0,'benchmarks')
import cuda_bench as B
B.register()
def prof(name, opt, before, n=60):
    for i in range(5): before(i); opt.step()
    torch.cuda.synchronize()
    t=[]
    for i in range(30):
        before(i); torch.cuda.synchronize(); s=time.perf_counter(); opt.step(); e=time.perf_counter(); torch.cuda.synchronize(); f=time.perf_counter(); t.append((e-s,f-s))
    t.sort(); print(f"== {name}: host {t[15][0]*1e3:.3f} ms, done {sorted(x[1] for x in t)[15]*1e3:.3f} ms")
    pr=cProfile.Profile()
    for i in range(n):
        before(i); torch.cuda.synchronize(); pr.enable(); opt.step(); pr.disable()
    pstats.Stats(pr).sort_stats('tottime').print_stats(28)
rows,width=1_000_000,16
p=torch.nn.Parameter(torch.randn(rows,width,device='cuda')); g=B.sparse(rows,width,'mixed')
def before(i): p.grad=torch.sparse_coo_tensor(g._indices(),g._values(),g.shape,check_invariants=False)
prof('rows',cadam.CAdam([p]),before)
ps=[torch.nn.Parameter(torch.randn(100,device='cuda')) for _ in range(2000)]
gs=[[torch.randn(100,device='cuda') for _ in ps] for _ in range(2)]
def before(i):
    for p,g in zip(ps,gs[i%2]): p.grad=g
prof('tiny',cadam.CAdam(ps),before)
ps2=[torch.nn.Parameter(torch.randn(s,device='cuda')) for s in B.resnet()]
gs2=[[torch.randn_like(p) for p in ps2] for _ in range(2)]
def before(i):
    for p,g in zip(ps2,gs2[i%2]): p.grad=g
prof('resnet',cadam.CAdam(ps2),before)
